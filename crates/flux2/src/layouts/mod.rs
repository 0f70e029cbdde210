//! The names that other programs give to the tensors of FLUX.2, its text encoder and its VAE.
//!
//! | layout | recognised by | files |
//! |---|---|---|
//! | diffusers, transformers | nothing to do | model folders |
//! | BFL | `img_in.weight`, `decoder.mid.block_1.*` | BFL's and ComfyUI's single files, GGUF files of the transformer |
//! | llama.cpp | `token_embd.weight` | GGUF files of the text encoder |
//!
//! Each also below the prefixes under which programs keep the parts of a whole model in one file. Every function gives a
//! source that it does not recognise back as it is; what is wrong with it is for the plan to say.

mod text_encoder;
mod transformer;
mod vae;

pub use self::{text_encoder::text_encoder, transformer::transformer, vae::vae};

/// Prefixes of the parts of a whole model in one file.
const COMPONENTS: &[&str] = &[
    "model.diffusion_model.",
    "vae.",
    "first_stage_model.",
    "text_encoders.",
    "text_encoder.",
    "cond_stage_model.",
    "conditioner.",
];

/// Whether a tensor belongs to another part of the model than the one whose names start with `prefix`.
fn is_of_another_component(name: &str, prefix: &str) -> bool {
    !prefix.is_empty() && COMPONENTS.iter().any(|other| !prefix.starts_with(other) && name.starts_with(other))
}

/// Number and rest of `NUMBER.REST`.
fn index(text: &str) -> Option<(usize, &str)> {
    let (number, rest) = text.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

/// Tables of published names (`tests/reference/layout_tables.py`).
#[cfg(test)]
mod published {
    use std::{fs, path::Path};

    use weights::layout::{Take, View};

    /// Compares what `views` says with every row of a table, and counts that each is said once.
    pub(super) fn check(table: &str, views: impl Fn(&str) -> Option<Vec<View>>) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/names").join(table);
        let text = fs::read_to_string(path).unwrap();
        let mut rows: Vec<(&str, View)> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let &[file, model, shape, take] = line.split('\t').collect::<Vec<_>>().as_slice() else { panic!("{line}") };
            let take = match take.split_once('/') {
                Some((index, of)) => Take::Part { index: index.parse().unwrap(), of: of.parse().unwrap() },
                None if take == "swapped" => Take::SwappedHalves,
                None if shape.ends_with(",1,1") && model.contains("attentions") => Take::Matrix,
                None => Take::Whole,
            };
            rows.push((file, View::new(model, take)));
        }
        let mut files: Vec<&str> = rows.iter().map(|(file, _)| *file).collect();
        files.dedup();
        let mut said: Vec<(&str, View)> = Vec::new();
        for file in files {
            let found = views(file).unwrap_or_else(|| panic!("{file} is unknown"));
            said.extend(found.into_iter().map(|view| (file, view)));
        }
        for list in [&mut rows, &mut said] {
            list.sort_by(|a, b| a.1.name.cmp(&b.1.name));
        }
        assert_eq!(said, rows, "{table}");
    }
}
