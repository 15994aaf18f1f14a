use std::fmt::Display;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::import::ImportError;

/// The keys of a `config.json`, or of an object in it. A key that is `null` is as one that is not there.
pub(super) struct Settings<'a> {
    file: &'a Path,
    /// Where in the file, with a dot at the end.
    within: String,
    values: &'a Map<String, Value>,
}

impl<'a> Settings<'a> {
    pub fn new(file: &'a Path, values: &'a Map<String, Value>) -> Self {
        Self {
            file,
            within: String::new(),
            values,
        }
    }

    fn find(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key that may be left out.
    pub fn get<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T, ImportError> {
        match self.find(key) {
            None => Ok(default),
            Some(_) => self.require(key),
        }
    }

    /// The value of a key that must be there.
    pub fn require<T: DeserializeOwned>(&self, key: &str) -> Result<T, ImportError> {
        let value = self.values.get(key).unwrap_or(&Value::Null);
        T::deserialize(value).map_err(|error| self.refuse(key, error))
    }

    /// Refuses all values of a key but these, which it may be left out for.
    pub fn only<T: Into<Value> + Copy>(&self, key: &str, works: &[T]) -> Result<(), ImportError> {
        let works: Vec<Value> = works.iter().map(|value| (*value).into()).collect();
        match self.find(key) {
            Some(value) if !works.contains(value) => {
                let works: Vec<String> = works.iter().map(Value::to_string).collect();
                Err(self.refuse(key, format!("what can be read is {}", works.join(" or "))))
            }
            _ => Ok(()),
        }
    }

    /// The object that a key has, if it is there.
    pub fn within(&self, key: &str) -> Result<Option<Self>, ImportError> {
        match self.find(key) {
            None => Ok(None),
            Some(Value::Object(values)) => Ok(Some(Self {
                file: self.file,
                within: format!("{}{key}.", self.within),
                values,
            })),
            Some(_) => Err(self.refuse(key, "what can be read is an object")),
        }
    }

    /// The error that the values of several keys do not go together.
    pub fn wrong(&self, why: impl Display) -> ImportError {
        ImportError::file(self.file, why)
    }

    /// The error that a key's value cannot be taken.
    pub fn refuse(&self, key: &str, works: impl Display) -> ImportError {
        ImportError::Setting {
            file: self.file.display().to_string(),
            key: format!("{}{key}", self.within),
            value: self.values.get(key).unwrap_or(&Value::Null).to_string(),
            works: works.to_string(),
        }
    }
}
