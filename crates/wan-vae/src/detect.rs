//! What a file holds, told by names and shapes of its tensors, never by its name.

use std::collections::BTreeMap;

use weights::{TensorInfo, TensorSource, inspect::recognise};

use crate::{
    architecture::{Architecture, Block, MAX_BLOCKS, MAX_STAGES, Network, Resample, Stage, Unpack},
    error::{Error, Result},
    names::{NameMap, index},
};

/// Prefixes that other programs put before every name.
const PREFIXES: &[&str] = &["", "vae.", "first_stage_model.", "model."];

/// Ends of names that only these networks have (others have `norm1.weight`), in both layouts.
const MARKERS: [&[&str]; 2] = [
    &["middle.0.residual.0.gamma", "middle.2.residual.3.gamma"],
    &["mid_block.resnets.0.norm1.gamma", "mid_block.resnets.1.norm2.gamma"],
];

/// How a file names its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// What stands before every name.
    pub prefix: &'static str,
    /// Whether modules are named as in the diffusers library, not as in the original code.
    pub diffusers: bool,
    /// The rule between the two.
    pub map: NameMap,
}

impl Layout {
    /// The diffusers name of a tensor of the file; `None` if it has no part in a VAE.
    pub fn to_diffusers(&self, in_file: &str) -> Option<String> {
        let name = in_file.strip_prefix(self.prefix)?;
        if self.diffusers { Some(name.to_owned()) } else { self.map.to_diffusers(name) }
    }

    /// The name in the file of a tensor in the diffusers layout.
    pub fn name_in_file(&self, diffusers: &str) -> String {
        let name = if self.diffusers { None } else { self.map.to_original(diffusers) };
        format!("{}{}", self.prefix, name.as_deref().unwrap_or(diffusers))
    }
}

/// The layout and the network in the file. Where tensors are missing, their shapes are guessed from those beside them,
/// so that the caller can name all that are missing.
///
/// # Errors
/// [`Error::NotAVae`] says what the file looks like instead.
pub fn detect(source: &dyn TensorSource) -> Result<(Layout, Architecture)> {
    let layout = layout(source)?;
    let mut names = BTreeMap::new();
    for tensor in source.tensors() {
        if let Some(name) = layout.to_diffusers(&tensor.name) {
            names.insert(name, tensor);
        }
    }
    let view = View { names, map: layout.map };
    let refuse = |e: Error| Error::NotAVae { file: source.describe().to_owned(), found: e.to_string() };
    Ok((layout, view.architecture().map_err(refuse)?))
}

fn layout(source: &dyn TensorSource) -> Result<Layout> {
    for &prefix in PREFIXES {
        for (diffusers, markers) in [false, true].into_iter().zip(MARKERS) {
            let has = |part: &str| markers.iter().any(|m| source.info(&format!("{prefix}{part}.{m}")).is_some());
            if has("encoder") || has("decoder") {
                let names: Vec<&str> = source.tensors().iter().filter_map(|t| t.name.strip_prefix(prefix)).collect();
                return Ok(Layout { prefix, diffusers, map: map(&names, diffusers) });
            }
        }
    }
    let found = match recognise(source.tensors()) {
        Some(guess) => format!("it looks like {}", guess.describe()),
        None if source.tensors().is_empty() => "it holds no tensors".to_owned(),
        None => format!("none of its {} tensors has a name that tells the model", source.tensors().len()),
    };
    Err(Error::NotAVae { file: source.describe().to_owned(), found })
}

/// The rule for names in a layout.
fn map(names: &[&str], diffusers: bool) -> NameMap {
    let any = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let nested = if diffusers {
        any("encoder.down_blocks.0.resnets.") || any("decoder.up_blocks.0.upsampler.")
    } else {
        any("encoder.downsamples.0.downsamples.") || any("decoder.upsamples.0.upsamples.")
    };
    // Numbers in one list, and what follows them: `list.N.rest`.
    let list = |prefix: String| names.iter().filter_map(move |name| index(name.strip_prefix(prefix.as_str())?));
    let is_resampler = |rest: &str| rest.starts_with("resample.") || rest.starts_with("time_conv.");
    let blocks = |part: &str, original: &str, named: &str, default: usize| {
        let list_of = if diffusers { named } else { original };
        let prefix = format!("{part}.{list_of}.");
        let per_stage: Vec<(usize, &str)> = match (diffusers, nested, part) {
            (true, false, "encoder") | (false, false, _) => list(prefix).collect(),
            (true, ..) => {
                let resnets = list(prefix).filter_map(|(_, rest)| index(rest.strip_prefix("resnets.")?));
                resnets.collect()
            }
            (false, true, _) => {
                let inner = format!("{original}.");
                list(prefix).filter_map(|(_, rest)| index(rest.strip_prefix(inner.as_str())?)).collect()
            }
        };
        let resampler = per_stage.iter().filter(|(_, rest)| is_resampler(rest)).map(|(n, _)| *n).min();
        resampler.or_else(|| per_stage.iter().map(|(n, _)| n + 1).max()).unwrap_or(default)
    };
    NameMap {
        nested,
        encoder_blocks: blocks("encoder", "downsamples", "down_blocks", 2),
        decoder_blocks: blocks("decoder", "upsamples", "up_blocks", 3),
    }
}

/// Tensors by their diffusers names.
struct View<'a> {
    names: BTreeMap<String, &'a TensorInfo>,
    map: NameMap,
}

impl View<'_> {
    fn architecture(&self) -> Result<Architecture> {
        let parts = [("decoder", "conv_out"), ("decoder", "conv_in"), ("encoder", "conv_in"), ("encoder", "conv_out")];
        let kernel = parts.iter().find_map(|(part, end)| self.shape(&format!("{part}.{end}.weight")));
        let temporal_kernel = match kernel {
            // Kernels of two axes see one frame.
            Some([_, _, _, _]) => 1,
            Some([_, _, t, _, _]) => *t,
            _ => 3,
        };
        let z = self
            .extent("post_quant_conv.weight", 0)
            .or_else(|| self.extent("decoder.conv_in.weight", 1))
            .or_else(|| self.extent("encoder.conv_out.weight", 0).map(|c| c / 2))
            .or_else(|| self.extent("quant_conv.weight", 0).map(|c| c / 2));
        let z_dim = z.unwrap_or(if self.map.nested { 48 } else { 16 });
        let encoder = self.network("encoder", temporal_kernel)?;
        let decoder = self.network("decoder", temporal_kernel)?;
        let patch_size = encoder.as_ref().map_or(Ok(None), |e| side("encoder", e.in_channels).map(Some))?;
        let out_side = decoder.as_ref().map_or(Ok(None), |d| side("decoder", d.out_channels).map(Some))?;
        let side = out_side.or(patch_size).unwrap_or(1);
        // Only networks of the 2.2 family pack pixels on the way in; others that give more channels enlarge pictures.
        let unpack = if self.map.nested || side == 1 { Unpack::Patches(side) } else { Unpack::PixelShuffle(side) };
        let patch_size = patch_size.unwrap_or(if self.map.nested { side } else { 1 });
        Ok(Architecture { z_dim, residual: self.map.nested, temporal_kernel, patch_size, unpack, encoder, decoder })
    }

    /// Encoder or decoder, if any of its tensors is there.
    fn network(&self, part: &'static str, temporal_kernel: usize) -> Result<Option<Network>> {
        if !self.has(&format!("{part}.")) {
            return Ok(None);
        }
        let encoder = part == "encoder";
        let blocks = if encoder { self.map.encoder_blocks } else { self.map.decoder_blocks };
        let stages = self.stages(encoder, blocks);
        if stages > MAX_STAGES || blocks > MAX_BLOCKS {
            return Err(Error::Architecture { what: format!("{part} of {stages} stages with {blocks} blocks each") });
        }
        let conv_in = format!("{part}.conv_in");
        let first = self.block_at(encoder, 0, 0);
        let base = self.output(&conv_in).or_else(|| self.input(&first)).unwrap_or(1);
        let fallback = if encoder { 3 } else { 16 };
        let in_channels = self.extent(&format!("{conv_in}.weight"), 1).unwrap_or(fallback);
        let out_channels = self.output(&format!("{part}.conv_out")).unwrap_or(3);

        let mut width = base;
        let mut list = Vec::with_capacity(stages);
        for stage in 0..stages {
            let mut here = Vec::with_capacity(blocks);
            for j in 0..blocks {
                let prefix = self.block_at(encoder, stage, j);
                let output = self.block_output(&prefix).or_else(|| self.input(&self.block_at(encoder, stage, j + 1)));
                let input = self.input(&prefix).unwrap_or(width);
                let output = output.unwrap_or(width);
                let shortcut = input != output || self.has(&format!("{prefix}.conv_shortcut."));
                here.push(Block { input, output, shortcut });
                width = output;
            }
            let resample = (stage + 1 < stages).then(|| {
                let prefix = self.resampler_at(encoder, stage);
                let conv = format!("{prefix}.resample.1");
                let input = self.extent(&format!("{conv}.weight"), 1).unwrap_or(width);
                let output = self.output(&conv).or_else(|| self.input(&self.block_at(encoder, stage + 1, 0)));
                // Kernels without extent in time belong to networks for pictures, whatever else is in the file.
                let temporal = temporal_kernel > 1 && self.has(&format!("{prefix}.time_conv."));
                Resample { input, output: output.unwrap_or(width), temporal }
            });
            width = resample.map_or(width, |r| r.output);
            list.push(Stage { blocks: here, resample });
        }
        Ok(Some(Network { in_channels, base, stages: list, out_channels }))
    }

    /// Number of stages: one more than have a resampler, and as many as have any tensor.
    fn stages(&self, encoder: bool, blocks: usize) -> usize {
        let prefix = if encoder { "encoder.down_blocks." } else { "decoder.up_blocks." };
        let flat = encoder && !self.map.nested;
        let under = self.names.range(prefix.to_owned()..).map_while(|(name, _)| name.strip_prefix(prefix));
        let needed = under.filter_map(index).map(|(n, rest)| {
            let stage = if flat { n / (blocks + 1) } else { n };
            let resampler = rest.contains("resample.") || rest.contains("time_conv.");
            stage + 1 + usize::from(resampler)
        });
        needed.max().unwrap_or(1)
    }

    fn block_at(&self, encoder: bool, stage: usize, j: usize) -> String {
        match (encoder, self.map.nested) {
            (true, false) => format!("encoder.down_blocks.{}", stage * (self.map.encoder_blocks + 1) + j),
            (true, true) => format!("encoder.down_blocks.{stage}.resnets.{j}"),
            (false, _) => format!("decoder.up_blocks.{stage}.resnets.{j}"),
        }
    }

    fn resampler_at(&self, encoder: bool, stage: usize) -> String {
        match (encoder, self.map.nested) {
            (true, false) => self.block_at(true, stage, self.map.encoder_blocks),
            (true, true) => format!("encoder.down_blocks.{stage}.downsampler"),
            (false, true) => format!("decoder.up_blocks.{stage}.upsampler"),
            (false, false) => format!("decoder.up_blocks.{stage}.upsamplers.0"),
        }
    }

    /// Channels that come into a block.
    fn input(&self, block: &str) -> Option<usize> {
        self.extent(&format!("{block}.conv1.weight"), 1).or_else(|| self.extent(&format!("{block}.norm1.gamma"), 0))
    }

    /// Channels that leave a block.
    fn block_output(&self, block: &str) -> Option<usize> {
        ["conv1", "conv2"]
            .iter()
            .find_map(|conv| self.output(&format!("{block}.{conv}")))
            .or_else(|| self.extent(&format!("{block}.norm2.gamma"), 0))
    }

    /// Channels that leave a convolution.
    fn output(&self, conv: &str) -> Option<usize> {
        ["weight", "bias"].iter().find_map(|kind| self.extent(&format!("{conv}.{kind}"), 0))
    }

    fn extent(&self, name: &str, axis: usize) -> Option<usize> {
        self.shape(name)?.get(axis).copied()
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.names.get(name).map(|tensor| tensor.shape.as_slice())
    }

    fn has(&self, prefix: &str) -> bool {
        self.names.range(prefix.to_owned()..).next().is_some_and(|(name, _)| name.starts_with(prefix))
    }
}

/// Side of the squares of pixels in so many channels of a picture with three or four colours.
fn side(part: &str, channels: usize) -> Result<usize> {
    match channels {
        3 | 4 => Ok(1),
        12 | 16 => Ok(2),
        _ => Err(Error::Architecture {
            what: format!(
                "{part} with {channels} channels of pixels, expected 3 or 4, or 12 or 16 for squares of 2 x 2"
            ),
        }),
    }
}
