use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::InputError;
use crate::config::refuse;
use crate::tokens::{eos_of, load_tokenizer};

/// What tokens are.
pub enum Vocabulary {
    /// Bytes of UTF-8.
    Bytes,
    /// Entries of a tokenizer.
    Tokens(Box<Tokenizer>),
}

/// Makes text of tokens as they come: what a token completes, which may be nothing yet.
pub(super) type Writer<'a> = Box<dyn FnMut(u32) -> Result<String, String> + 'a>;

impl Vocabulary {
    /// A tokenizer's.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(file: &Path) -> Result<Self, InputError> {
        Ok(Self::Tokens(Box::new(load_tokenizer(file)?)))
    }

    /// The tokens of a text; `special` adds what the tokenizer puts around one, such as a token for its begin.
    ///
    /// # Errors
    /// If the tokenizer cannot do it, or makes a token that is no entry of a vocabulary of this size.
    pub fn encode(&self, text: &str, special: bool, entries: usize) -> Result<Vec<u32>, InputError> {
        let tokens = match self {
            Self::Bytes => text.bytes().map(u32::from).collect(),
            Self::Tokens(tokenizer) => {
                let encoding = tokenizer.encode_fast(text, special);
                let encoding = encoding.map_err(|error| InputError(format!("--tokenizer: {error}")))?;
                encoding.get_ids().to_vec()
            }
        };
        match tokens.iter().find(|token| **token as usize >= entries) {
            Some(token) => refuse(format!(
                "--tokenizer: it makes token {token} of the prompt, and the model has {entries}; give the tokenizer that it was \
                 trained with"
            )),
            None => Ok(tokens),
        }
    }

    /// The token of a name or an id.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn token(&self, named: &Value) -> Result<u32, InputError> {
        match (named, self) {
            (Value::String(name), Self::Tokens(tokenizer)) => eos_of(tokenizer, name),
            _ => match named.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) => Ok(id),
                None => refuse(format!("--from: eos_token_id {named} is no token")),
            },
        }
    }

    /// A writer that goes on from tokens that are written already. Characters come whole: the bytes of one that is not yet
    /// complete are held back; what cannot become one is U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer cannot decode those tokens.
    pub(super) fn writer(&self, before: &[u32]) -> Result<Writer<'_>, String> {
        let mut writer: Writer<'_> = match self {
            Self::Bytes => {
                let mut held = Vec::new();
                Box::new(move |token| {
                    held.push(token as u8);
                    Ok(complete(&mut held))
                })
            }
            Self::Tokens(tokenizer) => {
                let (mut stream, mut held) = (tokenizer.decode_stream(true), Vec::new());
                Box::new(move |token| {
                    held.push(token);
                    let text = stream.step(token).or_else(|_| {
                        // Tokens that are bytes are decoded together. One that is no part of a character spoils those before it,
                        // which are written: what comes after these is decoded by itself.
                        stream = tokenizer.decode_stream(true);
                        held.iter().try_fold(None, |_, held| stream.step(*held))
                    });
                    let text = text.map_err(|error| format!("--tokenizer: {error}"))?;
                    if text.is_some() {
                        held.clear();
                    }
                    Ok(text.unwrap_or_default())
                })
            }
        };
        // A token's text may depend on what comes before it: a space, say.
        for token in before {
            writer(*token)?;
        }
        Ok(writer)
    }
}

/// Takes all but the beginning of a character from the end of some bytes.
fn complete(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(held) {
            Ok(valid) => {
                text.push_str(valid);
                held.clear();
                return text;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&held[..valid]));
                match error.error_len() {
                    Some(wrong) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        held.drain(..valid + wrong);
                    }
                    None => {
                        held.drain(..valid);
                        return text;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(bytes: &[u8]) -> Vec<String> {
        let mut writer = Vocabulary::Bytes.writer(&[]).unwrap();
        bytes.iter().map(|byte| writer(u32::from(*byte)).unwrap()).collect()
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(steps("aé€".as_bytes()), ["a", "", "é", "", "", "€"]);
        assert_eq!(steps("😀".as_bytes()).concat(), "😀");
    }

    #[test]
    fn what_is_no_character_is_replaced() {
        assert_eq!(steps(&[0xff, b'a', 0xc3, b'b']), ["\u{fffd}", "a", "", "\u{fffd}b"]);
        // Cut off at the end, it is held back.
        assert_eq!(steps(&[b'a', 0xe2, 0x82]), ["a", "", ""]);
    }

    /// Words, and bytes for what is none, as in Llama's tokenizer: token 256 is " a", 257 "b", and those below are bytes.
    fn byte_fallback() -> Vocabulary {
        let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), Value::from(byte)));
        let words = [("▁a", 256), ("b", 257)].map(|(word, id)| (word.to_string(), Value::from(id)));
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {"type": "BPE", "vocab": bytes.chain(words).collect::<serde_json::Map<_, _>>(), "merges": [],
                "unk_token": null, "byte_fallback": true},
        });
        Vocabulary::Tokens(Box::new(json.to_string().parse().unwrap()))
    }

    /// Bytes that are no character, after some that are one: what was written stays, and the text goes on.
    #[test]
    fn a_tokenizers_bytes_that_are_no_character() {
        let vocabulary = byte_fallback();
        let steps = |tokens: &[u32]| -> Vec<String> {
            let mut writer = vocabulary.writer(&[]).unwrap();
            tokens.iter().map(|token| writer(*token).unwrap()).collect()
        };
        const E_ACUTE: [u32; 2] = [0xc3, 0xa9];
        assert_eq!(steps(&[256, 0xc3, 0xa9, 257]), ["a", "", "é", "b"]);
        assert_eq!(steps(&[0xc3, 0xa9, 0xff, 257]), ["", "é", "", "\u{fffd}b"]);
        // Spaces and characters as ever after that, and once more.
        let again = [&E_ACUTE[..], &[0xff, 256, 256], &E_ACUTE, &[0xff, 0xff, 257, 256]].concat();
        assert_eq!(steps(&again).concat(), "é\u{fffd} a aé\u{fffd}\u{fffd}b a");
        // A character between them is spoilt: the decoder takes bytes in a row together.
        let between = [&E_ACUTE[..], &[0xff], &E_ACUTE, &[257]].concat();
        assert_eq!(steps(&between).concat(), "é\u{fffd}\u{fffd}\u{fffd}b");
        // In the prompt, too.
        let mut writer = vocabulary.writer(&[0xc3, 0xa9, 0xff]).unwrap();
        assert_eq!(writer(257).unwrap(), "\u{fffd}b");
    }
}
