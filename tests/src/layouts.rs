//! Checkpoints as other programs store them.
//!
//! What goes where is read from the tables of `models/names`, which the converters of diffusers and llama.cpp made
//! (`reference/layout_tables.py`); the crates' own tables are not used.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context, Result, ensure};

use crate::{
    container::{Container, Stored},
    data,
};

/// A row of a table: one of the model's tensors in a tensor of the other program's file.
struct Row {
    model: String,
    /// Extents in the published file.
    rank: usize,
    take: Take,
}

enum Take {
    Whole,
    /// These rows of several tensors one after another.
    Part(usize),
    SwappedHalves,
}

/// `container` in the layout of the table `names/TABLE.layouts.tsv`, under `prefix`.
///
/// # Errors
/// If the table cannot be read, a fused tensor lacks a part, or a tensor has no place in the layout.
pub fn relayout(container: &Container, table: &str, prefix: &str) -> Result<Container> {
    let mut out = Container { metadata: container.metadata.clone(), ..Container::default() };
    let mut used = BTreeSet::new();
    for (file, mut rows) in rows(table)? {
        rows.sort_by_key(|row| match row.take {
            Take::Part(index) => index,
            _ => 0,
        });
        let found: Vec<(&Row, &Stored)> =
            rows.iter().filter_map(|row| Some((row, find(container, &row.model)?))).collect();
        // A smaller model has fewer blocks than the published one.
        if found.is_empty() {
            continue;
        }
        ensure!(found.len() == rows.len(), "{file} lacks a part");
        used.extend(rows.iter().map(|row| row.model.trim_start_matches("model.").to_owned()));
        out.tensors.insert(format!("{prefix}{file}"), join(&found));
    }
    let left = container.tensors.keys().find(|name| !used.contains(name.trim_start_matches("model.")));
    ensure!(left.is_none(), "{left:?} has no place in the layout {table}");
    Ok(out)
}

/// The same tensors under `prefix`.
pub fn prefixed(container: &Container, prefix: &str) -> Container {
    let tensors = container.tensors.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone()));
    Container { metadata: container.metadata.clone(), tensors: tensors.collect() }
}

/// A bare language model is stored without `model.`.
fn find<'a>(container: &'a Container, name: &str) -> Option<&'a Stored> {
    container.tensors.get(name).or_else(|| container.tensors.get(name.strip_prefix("model.")?))
}

fn join(parts: &[(&Row, &Stored)]) -> Stored {
    let (row, first) = parts[0];
    let mut shape = first.shape.clone();
    if parts.len() > 1 {
        shape[0] *= parts.len();
    }
    // Maps that the other program stores as kernels of 1x1.
    shape.resize(shape.len().max(row.rank), 1);
    let mut bytes: Vec<u8> = parts.iter().flat_map(|(_, stored)| stored.bytes.iter().copied()).collect();
    if let Take::SwappedHalves = row.take {
        let half = bytes.len() / 2;
        bytes.rotate_left(half);
    }
    Stored { dtype: first.dtype.clone(), shape, bytes }
}

fn rows(table: &str) -> Result<BTreeMap<String, Vec<Row>>> {
    let path = data(&format!("models/names/{table}.layouts.tsv"));
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut rows: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[file, model, shape, take] = columns.as_slice() else { anyhow::bail!("{table}: {line}") };
        let take = match take.split_once('/') {
            Some((index, _)) => Take::Part(index.parse()?),
            None if take == "swapped" => Take::SwappedHalves,
            None => Take::Whole,
        };
        let rank = shape.split(',').filter(|extent| !extent.is_empty()).count();
        rows.entry(file.to_owned()).or_default().push(Row { model: model.to_owned(), rank, take });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demonstration_models_have_a_place_in_every_layout() -> Result<()> {
        for (component, table, name) in [
            ("transformer/diffusion_pytorch_model", "flux2-dev", "double_blocks.1.txt_attn.qkv.weight"),
            ("vae/diffusion_pytorch_model", "flux2-vae", "decoder.mid.attn_1.q.weight"),
            ("text_encoder/model", "qwen3-8b", "blk.6.attn_q.weight"),
        ] {
            let container = Container::read(&data(&format!("models/flux2-demo/{component}.safetensors")))?;
            let other = relayout(&container, table, "")?;
            let bytes = |c: &Container| c.tensors.values().map(|t| t.bytes.len()).sum::<usize>();
            assert_eq!(bytes(&other), bytes(&container), "{component}");
            assert!(other.tensors.contains_key(name), "{component}");
        }
        Ok(())
    }
}
