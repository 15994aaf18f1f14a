use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Value, json};

use super::HuggingFace;
use super::draft::{CONFIG, Draft};
use super::files::{INDEX, SINGLE, TensorFile};
use super::names::HEAD;
use crate::import::{Form, ImportError, from_file_dtype, to_file_dtype};
use crate::transformer::Transformer;

/// Bytes of tensors in a file, if nothing else is said: what `save_pretrained` took before version 5.
const SHARD_SIZE: u64 = 5_000_000_000;

/// Bytes written at a time.
const CHUNK: usize = 1 << 20;

/// A tensor to be written.
pub(super) struct Saved {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    /// The parameters that are its parts, side by side in its last dimension; most are one.
    parts: Vec<Box<dyn Fn() -> TensorData>>,
}

impl Saved {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    fn write(&self, file: &mut impl Write) -> std::io::Result<()> {
        let dtype = from_file_dtype(self.dtype).expect("it is one of Burn's");
        let parts: Vec<TensorData> = self.parts.iter().map(|part| part().convert_dtype(dtype)).collect();
        let rows = match parts.len() {
            1 => 1,
            _ => self.shape.iter().rev().skip(1).product(),
        };
        for row in 0..rows {
            for part in &parts {
                let width = part.as_bytes().len() / rows;
                file.write_all(&part.as_bytes()[row * width..][..width])?;
            }
        }
        Ok(())
    }
}

/// The tensors that a model is, in its own order.
pub(super) fn collect(checkpoint: &HuggingFace, model: &Transformer) -> Result<Vec<Saved>, ImportError> {
    let device = model.embedding.weight.lazy_device();
    let (expected, found) = (shapes(&checkpoint.config.undrawn(&device)), shapes(model));
    let different = |path: &&String| expected.get(*path) != found.get(*path);
    if let Some(path) = expected.keys().chain(found.keys()).find(different) {
        let show = |shape: Option<&Vec<usize>>| shape.map_or("missing".into(), |shape| format!("{shape:?}"));
        return Err(ImportError::Model {
            path: path.clone(),
            found: show(found.get(path)),
            expected: show(expected.get(path)),
        });
    }
    let mut collect = Collect {
        checkpoint,
        path: Vec::new(),
        tensors: Vec::new(),
        error: None,
    };
    model.visit(&mut collect);
    match collect.error {
        Some(error) => Err(error),
        None => Ok(collect.tensors),
    }
}

/// Writes all files of a checkpoint.
pub(super) fn write(checkpoint: &HuggingFace, tensors: Vec<Saved>, draft: &Draft) -> Result<(), ImportError> {
    let mut settings = checkpoint.settings.clone();
    if checkpoint.dtype.is_some() || checkpoint.files.is_none() {
        // Version 4 of transformers writes "torch_dtype", version 5 reads it too.
        let key = if settings.contains_key("dtype") {
            "dtype"
        } else {
            "torch_dtype"
        };
        let most = tensors.iter().max_by_key(|tensor| tensor.bytes());
        let name = most.and_then(|tensor| from_file_dtype(tensor.dtype)).map(python_name);
        settings.insert(key.into(), json!(name));
    }
    write_json(draft, CONFIG, &Value::Object(settings))?;
    let opened = checkpoint.files.as_ref();
    let place = opened.map(|files| files.place.as_path());
    draft.take_along(place, checkpoint.tokenizer.as_deref())?;
    let size: usize = tensors.iter().map(Saved::bytes).sum();
    let parameters: usize = tensors
        .iter()
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let mut places = BTreeMap::new();
    let files = files(checkpoint, tensors);
    let several = files.len() > 1 || files.iter().any(|(file, _)| file.name != SINGLE);
    for (file, mut tensors) in files {
        let path = draft.path(&file.name);
        write_tensors(&path, file.about, &mut tensors).map_err(|error| ImportError::file(&path, error))?;
        places.extend(tensors.into_iter().map(|tensor| (tensor.name, file.name.clone())));
    }
    if several {
        let mut about = opened.map(|files| files.about.clone()).unwrap_or_default();
        about.insert("total_parameters".into(), json!(parameters));
        about.insert("total_size".into(), json!(size));
        write_json(draft, INDEX, &json!({ "metadata": about, "weight_map": places }))?;
    }
    Ok(())
}

/// As transformers writes JSON: sorted, two spaces, a new line at the end.
fn write_json(draft: &Draft, name: &str, value: &Value) -> Result<(), ImportError> {
    let mut text = serde_json::to_string_pretty(value).expect("plain values become JSON");
    text.push('\n');
    draft.write(name, text.as_bytes())
}

/// A safetensors file as Python's library writes it: larger elements first, then by name.
fn write_tensors(path: &Path, about: Option<HashMap<String, String>>, tensors: &mut [Saved]) -> std::io::Result<()> {
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.bytes();
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        (tensor.name.clone(), info)
    });
    let header = Metadata::new(about, infos.collect()).map_err(std::io::Error::other)?;
    let mut header = serde_json::to_vec(&header)?;
    // So that tensors are aligned.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    let mut file = BufWriter::with_capacity(CHUNK, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for tensor in tensors {
        tensor.write(&mut file)?;
    }
    file.into_inner()?.sync_all()
}

/// Which tensors are in which file.
fn files(checkpoint: &HuggingFace, tensors: Vec<Saved>) -> Vec<(TensorFile, Vec<Saved>)> {
    if let Some(opened) = checkpoint.kept_files() {
        let mut files: BTreeMap<usize, Vec<Saved>> = BTreeMap::new();
        for tensor in tensors {
            // It has them all: they have been collected.
            let (file, _) = opened.tensors[&tensor.name];
            files.entry(file).or_default().push(tensor);
        }
        return files
            .into_iter()
            .map(|(file, tensors)| (opened.files[file].clone(), tensors))
            .collect();
    }
    let limit = checkpoint.shard_size.unwrap_or(SHARD_SIZE);
    let mut shards: Vec<Vec<Saved>> = Vec::new();
    let mut size = 0;
    for tensor in tensors {
        let bytes = tensor.bytes() as u64;
        match shards.last_mut() {
            Some(shard) if size + bytes <= limit => {
                size += bytes;
                shard.push(tensor);
            }
            _ => {
                size = bytes;
                shards.push(vec![tensor]);
            }
        }
    }
    let count = shards.len();
    let file = |number: usize| TensorFile {
        name: match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        },
        about: Some(HashMap::from([("format".to_owned(), "pt".to_owned())])),
    };
    shards
        .into_iter()
        .enumerate()
        .map(|(number, shard)| (file(number), shard))
        .collect()
}

fn python_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

struct Collect<'a> {
    checkpoint: &'a HuggingFace,
    path: Vec<String>,
    tensors: Vec<Saved>,
    error: Option<ImportError>,
}

impl Collect<'_> {
    /// The dtype to save a tensor in, of which this is the parameter's.
    fn dtype(&self, name: &str, own: DType) -> Result<Dtype, ImportError> {
        let files = self.checkpoint.files.as_ref();
        let opened = files.and_then(|files| Some((files, files.tensors.get(name)?.1)));
        let wrong = |dtype: String| ImportError::Dtype {
            name: name.to_owned(),
            dtype,
        };
        match (self.checkpoint.dtype, opened) {
            (None, Some((files, dtype))) => match from_file_dtype(dtype) {
                Some(_) => Ok(dtype),
                None => Err(wrong(format!("{dtype:?}")).of(&files.place)),
            },
            (chosen, _) => {
                let dtype = chosen.unwrap_or(own);
                to_file_dtype(dtype).ok_or_else(|| wrong(dtype.name().into()))
            }
        }
    }

    fn add<const D: usize>(&mut self, name: String, form: Form, param: &Param<Tensor<D>>) -> Result<(), ImportError> {
        let tensor = param.val().detach();
        let dtype = self.dtype(&name, tensor.dtype())?;
        let shape = form.shape(&tensor.dims());
        let data: Box<dyn Fn() -> TensorData> = match form {
            Form::Transposed => Box::new(move || tensor.clone().transpose().into_data()),
            _ => Box::new(move || tensor.to_data()),
        };
        // The parts of a tensor come soon one after another, in their order.
        match self.tensors.iter_mut().rev().find(|tensor| tensor.name == name) {
            Some(tensor) => tensor.parts.push(data),
            None => self.tensors.push(Saved {
                name,
                shape,
                dtype,
                parts: vec![data],
            }),
        }
        Ok(())
    }

    fn add_all<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), ImportError> {
        let (path, checkpoint) = (self.path.join("."), self.checkpoint);
        let place = checkpoint.family.place(checkpoint.prefix(), &path);
        if let Some(opened) = checkpoint.kept_files()
            && !opened.tensors.contains_key(&place.name)
        {
            let (name, folder) = (place.name, &opened.place);
            return Err(ImportError::Missing { name, path }.of(folder));
        }
        self.add(place.name, place.form, param)?;
        // As the opened checkpoint had it, beside the embedding that it is.
        let doubled = checkpoint.config.tie_embeddings && path == "embedding.weight";
        let had = |files: &super::Files| files.tensors.contains_key(HEAD);
        match doubled && checkpoint.files.as_ref().is_some_and(had) {
            true => self.add(HEAD.into(), Form::Same, param),
            false => Ok(()),
        }
    }
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_none() {
            self.error = self.add_all(param).err();
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// The shape of every parameter, by its path.
fn shapes(model: &Transformer) -> BTreeMap<String, Vec<usize>> {
    let mut shapes = Shapes::default();
    model.visit(&mut shapes);
    shapes.found
}

#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    found: BTreeMap<String, Vec<usize>>,
}

impl ModuleVisitor for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.insert(self.path.join("."), param.lazy_shape().to_vec());
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
