use safetensors::SafeTensors;

use super::{Vae, VaeConfig};
use crate::import::{ImportError, load};

impl VaeConfig {
    /// The name in a checkpoint of diffusers' `AutoencoderKLWan` of the parameter at a path of [`Vae`], such as
    /// `encoder.down_blocks.0.resnets.1.conv1.weight`. Its shape is the same.
    ///
    /// There, Wan 2.1's encoder is one list of blocks and steps.
    pub fn diffusers_name(&self, path: &str) -> String {
        diffusers_name(path, self.shortcuts, self.res_blocks)
    }
}

impl Vae {
    /// The model with the weights of a checkpoint of diffusers' `AutoencoderKLWan`, in the dtype that the model has.
    ///
    /// # Errors
    /// If a parameter is missing, of another shape or dtype, or the files have a tensor that is no parameter.
    pub fn load(self, files: &[SafeTensors<'_>]) -> Result<Self, ImportError> {
        let stage = self.encoder.down_blocks.first().expect("a VAE has a stage");
        let (shortcuts, res_blocks) = (stage.shortcut.is_some(), stage.resnets.len());
        load(self, files, |path| Some(diffusers_name(path, shortcuts, res_blocks)))
    }
}

fn diffusers_name(path: &str, shortcuts: bool, res_blocks: usize) -> String {
    let mut name = path.replace("sampler.resample.", "sampler.resample.1.");
    if shortcuts {
        return name;
    }
    name = name.replace(".upsampler.", ".upsamplers.0.");
    let Some(rest) = name.strip_prefix("encoder.down_blocks.") else {
        return name;
    };
    let parts: Vec<&str> = rest.split('.').collect();
    let flat = |stage: &str, block: usize| {
        let stage: usize = stage.parse().ok()?;
        Some(stage * (res_blocks + 1) + block)
    };
    let found = match parts[..] {
        [stage, "resnets", block, ref rest @ ..] => {
            let block = block.parse().ok().and_then(|block| flat(stage, block));
            block.map(|block| (block, rest.join(".")))
        }
        [stage, "downsampler", ref rest @ ..] => flat(stage, res_blocks).map(|block| (block, rest.join("."))),
        _ => None,
    };
    match found {
        Some((block, rest)) => format!("encoder.down_blocks.{block}.{rest}"),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names as they stand in the published checkpoints.
    #[test]
    fn names_are_those_of_the_checkpoints() {
        let same = [
            "encoder.conv_in.weight",
            "encoder.mid_block.resnets.0.norm1.gamma",
            "encoder.mid_block.attentions.0.to_qkv.bias",
            "decoder.up_blocks.1.resnets.0.conv_shortcut.weight",
            "decoder.norm_out.gamma",
            "post_quant_conv.bias",
        ];
        let wan21 = [
            (
                "encoder.down_blocks.0.resnets.1.conv1.weight",
                "encoder.down_blocks.1.conv1.weight",
            ),
            (
                "encoder.down_blocks.0.downsampler.resample.weight",
                "encoder.down_blocks.2.resample.1.weight",
            ),
            (
                "encoder.down_blocks.1.downsampler.time_conv.bias",
                "encoder.down_blocks.5.time_conv.bias",
            ),
            (
                "encoder.down_blocks.3.resnets.1.norm2.gamma",
                "encoder.down_blocks.10.norm2.gamma",
            ),
            (
                "decoder.up_blocks.0.upsampler.resample.bias",
                "decoder.up_blocks.0.upsamplers.0.resample.1.bias",
            ),
            (
                "decoder.up_blocks.1.upsampler.time_conv.weight",
                "decoder.up_blocks.1.upsamplers.0.time_conv.weight",
            ),
        ];
        let wan22 = [
            (
                "encoder.down_blocks.0.resnets.1.conv1.weight",
                "encoder.down_blocks.0.resnets.1.conv1.weight",
            ),
            (
                "encoder.down_blocks.1.downsampler.resample.weight",
                "encoder.down_blocks.1.downsampler.resample.1.weight",
            ),
            (
                "decoder.up_blocks.0.upsampler.time_conv.weight",
                "decoder.up_blocks.0.upsampler.time_conv.weight",
            ),
        ];
        for (config, names) in [(VaeConfig::wan21(), &wan21[..]), (VaeConfig::wan22(), &wan22[..])] {
            for (path, name) in names.iter().copied().chain(same.map(|name| (name, name))) {
                assert_eq!(config.diffusers_name(path), name);
            }
        }
    }
}
