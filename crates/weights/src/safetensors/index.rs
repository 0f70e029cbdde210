//! `*.safetensors.index.json`: which shard holds which tensor.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt,
    path::{Component, Path},
};

use serde::{
    Deserialize,
    de::{self, Deserializer, MapAccess, Visitor},
};

use super::json::shown_message;
use crate::{
    error::{Error, Result, list, shown},
    source::TensorSource,
};

/// Longest index that is read, in bytes. That of a model with 3,500 tensors has 300 kB.
pub(crate) const MAX_INDEX: u64 = 64 << 20;

/// The part of an index that we use; its `metadata` (a total size, often wrong) is not read.
#[derive(Deserialize)]
pub(crate) struct Index {
    weight_map: WeightMap,
}

/// Tensor to file, each tensor once.
struct WeightMap(BTreeMap<String, String>);

impl Index {
    pub(crate) fn parse(text: &[u8], name: &str) -> Result<Self> {
        let index: Self = serde_json::from_slice(text)
            .map_err(|e| Error::Json { file: name.to_owned(), message: shown_message(&e.to_string()) })?;
        match index.weight_map.0.values().find(|p| !is_plain_path(p)) {
            Some(path) => Err(Error::PathEscapes { file: name.to_owned(), path: shown(path) }),
            None => Ok(index),
        }
    }

    /// Names of the shards, sorted, each once.
    pub(crate) fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.0.values().map(String::as_str).collect()
    }

    /// Every tensor of the index is in the file that the index says. Tensors that the index does not name stay in the
    /// source: what the shards hold is what counts.
    pub(crate) fn check(&self, name: &str, source: &dyn TensorSource) -> Result<()> {
        let shards: Vec<&str> = self.shards().into_iter().collect();
        let wrong: Vec<String> = self
            .weight_map
            .0
            .iter()
            .filter(|(tensor, shard)| source.info(tensor).is_none_or(|t| shards.get(t.file) != Some(&shard.as_str())))
            .map(|(tensor, shard)| format!("{} ({})", shown(tensor), shown(shard)))
            .collect();
        if wrong.is_empty() {
            return Ok(());
        }
        Err(Error::IndexMismatch { index: name.to_owned(), tensors: wrong.len(), missing: list(&wrong) })
    }
}

/// Whether `path` is relative, goes only downwards, and means the same on every system.
pub(crate) fn is_plain_path(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0', ':'])
        && Path::new(path).components().all(|c| matches!(c, Component::Normal(_)))
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = WeightMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut names = BTreeMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    match names.entry(tensor) {
                        Entry::Vacant(slot) => {
                            slot.insert(file);
                        }
                        Entry::Occupied(slot) => {
                            let tensor = shown(slot.key());
                            let (first, second) = (shown(slot.get()), shown(&file));
                            return Err(de::Error::custom(format_args!(
                                "duplicate key `{tensor}`: placed in {first} and in {second}"
                            )));
                        }
                    }
                }
                Ok(WeightMap(names))
            }
        }
        d.deserialize_map(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_pass() {
        for good in ["a.safetensors", "sub/a.safetensors", "model-00001-of-00002.safetensors", "..a"] {
            assert!(is_plain_path(good), "{good}");
        }
        for bad in ["", "/etc/passwd", "../a", "a/../../b", "./a", "a\\b", "C:a", "a\0b", ".."] {
            assert!(!is_plain_path(bad), "{bad}");
        }
    }
}
