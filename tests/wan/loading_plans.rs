//! What the Wan VAEs want to load, against what the published models hold.
//!
//! Sparse files carry exactly the published names and shapes, in every layout: the network that is recognised in them must
//! take all tensors and miss none. The tables of both kinds of names were written down from the two implementations.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use tempfile::TempDir;
use tests::{NameTable, PthSkeleton, data};
use wan_vae::{Checkpoint, Error, Variant, checkpoint, detect::Layout, expected};
use weights::{Loader, TensorSource};

/// One published VAE.
struct Published {
    /// Table of diffusers names.
    diffusers: &'static str,
    /// Table of original names, diffusers names and shapes.
    layouts: &'static str,
    /// `torch.save` file under original names.
    pth: Option<&'static str>,
    variant: Variant,
    /// Tensors, elements, channels of the latents.
    figures: (usize, usize, usize),
}

const PUBLISHED: [Published; 3] = [
    Published {
        diffusers: "wan21-vae",
        layouts: "wan21-vae.layouts",
        pth: Some("wan-21-pth"),
        variant: Variant::Wan21,
        figures: (194, 126_892_531, 16),
    },
    Published {
        diffusers: "qwen-image-vae",
        layouts: "wan21-vae.layouts",
        pth: None,
        variant: Variant::Wan21,
        figures: (194, 126_892_531, 16),
    },
    Published {
        diffusers: "wan22-vae",
        layouts: "wan22-vae.layouts",
        pth: Some("wan-22-pth"),
        variant: Variant::Wan22,
        figures: (196, 704_688_668, 48),
    },
];

/// Those of ComfyUI's all-in-one checkpoints and of copies by others.
const PREFIXES: [&str; 4] = ["", "vae.", "first_stage_model.", "model."];

impl Published {
    /// Original name, diffusers name, shape.
    fn rows(&self) -> Result<Vec<(String, String, Vec<usize>)>> {
        let text = std::fs::read_to_string(data(&format!("models/names/{}.tsv", self.layouts)))?;
        let rows = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let cells: Vec<&str> = line.split('\t').collect();
            let [original, diffusers, shape] = cells[..] else { anyhow::bail!("{line}") };
            let shape = shape.split(',').map(str::parse).collect::<Result<_, _>>().with_context(|| line.to_owned())?;
            Ok((original.to_owned(), diffusers.to_owned(), shape))
        });
        rows.collect()
    }

    /// The tensors under original names.
    fn original(&self) -> Result<NameTable> {
        let rows = self.rows()?.into_iter();
        Ok(NameTable { tensors: rows.map(|(original, _, shape)| (original, shape)).collect() })
    }

    fn diffusers(&self) -> Result<NameTable> {
        NameTable::open(self.diffusers)
    }

    /// Every file in which people have this VAE, with a word for it.
    fn files(&self, dir: &Path) -> Result<Vec<(String, PathBuf)>> {
        let mut files = Vec::new();
        for (kind, table) in [("diffusers", self.diffusers()?), ("original", self.original()?)] {
            for prefix in PREFIXES {
                let tensors = table.tensors.iter().map(|(name, shape)| (format!("{prefix}{name}"), shape.clone()));
                let path = dir.join(format!("{kind}-{prefix}safetensors"));
                NameTable { tensors: tensors.collect() }.write_header_only(&path)?;
                files.push((format!("{}, {kind} names, prefix {prefix:?}", self.diffusers), path));
            }
        }
        let folder = dir.join("folder");
        std::fs::create_dir_all(&folder)?;
        self.diffusers()?.write_header_only(&folder.join("diffusion_pytorch_model.safetensors"))?;
        files.push((format!("{}, folder", self.diffusers), folder));
        if let Some(pth) = self.pth {
            let path = dir.join("vae.pth");
            PthSkeleton::open(pth)?.write(&path, |_| None)?;
            files.push((format!("{}, torch.save", self.diffusers), path));
        }
        Ok(files)
    }
}

fn open(path: &Path) -> Result<Checkpoint> {
    let (source, config) = checkpoint::open(path)?;
    Ok(Checkpoint::new(source, config.as_ref())?)
}

#[test]
fn published_checkpoints_are_taken_whole() -> Result<()> {
    for published in &PUBLISHED {
        let dir = TempDir::new()?;
        let files = published.files(dir.path())?;
        assert_eq!(files.len(), 9 + usize::from(published.pth.is_some()));
        let known: BTreeSet<_> = published.diffusers()?.tensors.into_iter().collect();
        for (what, path) in files {
            let found = open(&path).context(what.clone())?;
            ensure!(found.unused.is_empty(), "{what}: {:?} unused", found.unused);
            assert_eq!(found.variant, published.variant, "{what}");
            // Exactly the tensors of the diffusers class, and exactly those that the network asks for.
            let held: BTreeSet<_> = found.source.tensors().iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
            assert_eq!(held, known, "{what}");
            let plan = expected(&found.architecture);
            assert_eq!(plan.len(), held.len(), "{what}");
            Loader::new(found.source.clone(), &plan, |_| false, DType::F32, &Device::Cpu).context(what.clone())?;
            let elements: usize = held.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            let z = found.statistics.context("no statistics")?.mean().len();
            assert_eq!((held.len(), elements, z), published.figures, "{what}");
        }
    }
    Ok(())
}

#[test]
fn names_are_mapped_both_ways() -> Result<()> {
    for published in &PUBLISHED {
        let dir = TempDir::new()?;
        for (what, path) in published.files(dir.path())? {
            let layout: Layout = open(&path)?.layout;
            for (original, diffusers, _) in published.rows()? {
                let in_file = format!("{}{}", layout.prefix, if layout.diffusers { &diffusers } else { &original });
                assert_eq!(layout.to_diffusers(&in_file).as_deref(), Some(diffusers.as_str()), "{what}");
                assert_eq!(layout.name_in_file(&diffusers), in_file, "{what}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_missing_renamed_misshapen_or_needless_tensor_is_named() -> Result<()> {
    let dir = TempDir::new()?;
    let path = dir.path().join("vae.safetensors");
    for published in &PUBLISHED {
        for table in [published.diffusers()?, published.original()?] {
            let check = |table: &NameTable| -> Result<Result<Checkpoint, Error>> {
                table.write_header_only(&path)?;
                let (source, _) = checkpoint::open(&path)?;
                Ok(Checkpoint::new(source, None))
            };
            for victim in 0..table.tensors.len() {
                let name = table.tensors[victim].0.clone();
                let refused = |changed: &NameTable| -> Result<String> {
                    let error = check(changed)?.err().with_context(|| format!("{name} should be missed"))?;
                    let message = error.to_string();
                    ensure!(message.contains(&name) && !message.contains('\n'), "{name}: {message}");
                    Ok(message)
                };
                let mut without = table.clone();
                without.tensors.remove(victim);
                refused(&without)?;

                let mut renamed = table.clone();
                renamed.tensors[victim].0 = format!("{name}_typo");
                refused(&renamed)?;

                // One that no other tensor follows: the second tensor of a block, the bias of a convolution.
                if name.ends_with("norm2.gamma") || name.ends_with("residual.3.gamma") {
                    let mut misshapen = table.clone();
                    misshapen.tensors[victim].1[0] += 1;
                    let text = refused(&misshapen)?;
                    for (_, shape) in [&misshapen.tensors[victim], &table.tensors[victim]] {
                        ensure!(text.contains(&format!("{shape:?}")), "{name}: {text}");
                    }
                }

                if victim % 10 == 0 {
                    let mut extra = table.clone();
                    extra.tensors.push((format!("{name}.lora_A"), vec![4, 4]));
                    assert_eq!(check(&extra)??.unused, [format!("{name}.lora_A")]);
                }
            }
        }
    }
    Ok(())
}
