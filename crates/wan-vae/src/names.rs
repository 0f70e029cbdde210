//! Names of tensors in the two layouts, by rule and both ways.
//!
//! The original layout (`Wan-Video/Wan2.1: wan/modules/vae.py`, `wan/modules/vae2_2.py`), which ComfyUI uses too, numbers
//! the modules of its sequences; the diffusers layout (`scripts/convert_wan_to_diffusers.py`) names them. Shapes are the
//! same. Flat networks (Wan 2.1) count blocks and resamplers of all stages in one list, nested ones (Wan 2.2) have a list
//! per stage.

/// The rule between the layouts for one network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameMap {
    /// Whether each stage has a list of its own.
    pub nested: bool,
    /// Residual blocks per encoder stage: 2 in published models.
    pub encoder_blocks: usize,
    /// Residual blocks per decoder stage: 3 in published models.
    pub decoder_blocks: usize,
}

/// Original and diffusers name of a piece.
type Pair = (&'static str, &'static str);

/// Parts of a residual block.
const BLOCK: &[Pair] = &[
    ("residual.0", "norm1"),
    ("residual.2", "conv1"),
    ("residual.3", "norm2"),
    ("residual.6", "conv2"),
    ("shortcut", "conv_shortcut"),
];

/// Parts of a resampler. `resample.0` has no weights.
const RESAMPLER: &[Pair] = &[("resample.1", "resample.1"), ("time_conv", "time_conv")];

/// Parts of the attention.
const ATTENTION: &[Pair] = &[("norm", "norm"), ("to_qkv", "to_qkv"), ("proj", "proj")];

/// Modules between encoder and decoder.
const BETWEEN: &[Pair] = &[("conv1", "quant_conv"), ("conv2", "post_quant_conv")];

/// First and last modules of encoder and decoder.
const ENDS: &[Pair] = &[("conv1", "conv_in"), ("head.0", "norm_out"), ("head.2", "conv_out")];

/// Modules in the middle of encoder and decoder, and what they consist of.
const MIDDLE: &[(&str, &str, &[Pair])] = &[
    ("middle.0", "mid_block.resnets.0", BLOCK),
    ("middle.1", "mid_block.attentions.0", ATTENTION),
    ("middle.2", "mid_block.resnets.1", BLOCK),
];

/// From which layout a name is taken.
#[derive(Clone, Copy)]
enum From {
    Original,
    Diffusers,
}

impl NameMap {
    /// The diffusers name of a tensor, or of a module, in the original layout; `None` if the layout has no such module.
    pub fn to_diffusers(&self, original: &str) -> Option<String> {
        self.convert(original, From::Original)
    }

    /// The original name of a tensor, or of a module, in the diffusers layout; `None` if the layout has no such module.
    pub fn to_original(&self, diffusers: &str) -> Option<String> {
        self.convert(diffusers, From::Diffusers)
    }

    fn convert(&self, name: &str, from: From) -> Option<String> {
        let (stem, parameter) = match name.rsplit_once('.') {
            Some((stem, parameter @ ("weight" | "bias" | "gamma"))) => (stem, Some(parameter)),
            _ => (name, None),
        };
        let stem = self.convert_stem(stem, from)?;
        Some(match parameter {
            Some(parameter) => format!("{stem}.{parameter}"),
            None => stem,
        })
    }

    fn convert_stem(&self, stem: &str, from: From) -> Option<String> {
        if let Some(found) = translate(stem, BETWEEN, from) {
            return Some(found.to_owned());
        }
        let (part, rest) = stem.split_once('.')?;
        let encoder = match part {
            "encoder" => true,
            "decoder" => false,
            _ => return None,
        };
        if let Some(found) = translate(rest, ENDS, from) {
            return Some(format!("{part}.{found}"));
        }
        for &(original, diffusers, parts) in MIDDLE {
            let (here, there) = from.order(original, diffusers);
            if let Some(piece) = rest.strip_prefix(here).and_then(|r| r.strip_prefix('.')) {
                return Some(format!("{part}.{there}.{}", translate(piece, parts, from)?));
            }
        }
        let place = match from {
            From::Original => self.parse_original(rest, encoder)?,
            From::Diffusers => self.parse_diffusers(rest, encoder)?,
        };
        let piece = translate(place.piece, if place.is_block(self.blocks(encoder)) { BLOCK } else { RESAMPLER }, from)?;
        let module = match from {
            From::Original => self.diffusers_module(&place, encoder),
            From::Diffusers => self.original_module(&place, encoder),
        };
        Some(format!("{part}.{module}.{piece}"))
    }

    fn blocks(&self, encoder: bool) -> usize {
        if encoder { self.encoder_blocks } else { self.decoder_blocks }
    }

    fn parse_original<'a>(&self, rest: &'a str, encoder: bool) -> Option<Place<'a>> {
        let list = if encoder { "downsamples." } else { "upsamples." };
        let (first, rest) = index(rest.strip_prefix(list)?)?;
        if self.nested {
            let (module, piece) = index(rest.strip_prefix(list)?)?;
            return (module <= self.blocks(encoder)).then_some(Place { stage: first, module, piece });
        }
        Some(self.place_of(first, rest, encoder))
    }

    fn parse_diffusers<'a>(&self, rest: &'a str, encoder: bool) -> Option<Place<'a>> {
        let list = if encoder { "down_blocks." } else { "up_blocks." };
        let (first, rest) = index(rest.strip_prefix(list)?)?;
        if encoder && !self.nested {
            return Some(self.place_of(first, rest, encoder));
        }
        let blocks = self.blocks(encoder);
        if let Some(rest) = rest.strip_prefix("resnets.") {
            let (module, piece) = index(rest)?;
            return (module < blocks).then_some(Place { stage: first, module, piece });
        }
        let piece = rest.strip_prefix(self.diffusers_resampler(encoder))?.strip_prefix('.')?;
        Some(Place { stage: first, module: blocks, piece })
    }

    /// The place of the module that a flat list counts as `n`.
    fn place_of<'a>(&self, n: usize, piece: &'a str, encoder: bool) -> Place<'a> {
        let per_stage = self.blocks(encoder) + 1;
        Place { stage: n / per_stage, module: n % per_stage, piece }
    }

    fn original_module(&self, place: &Place<'_>, encoder: bool) -> String {
        let list = if encoder { "downsamples" } else { "upsamples" };
        let &Place { stage, module, .. } = place;
        if self.nested {
            format!("{list}.{stage}.{list}.{module}")
        } else {
            format!("{list}.{}", self.flat_index(place, encoder))
        }
    }

    fn diffusers_module(&self, place: &Place<'_>, encoder: bool) -> String {
        let list = if encoder { "down_blocks" } else { "up_blocks" };
        let &Place { stage, module, .. } = place;
        if encoder && !self.nested {
            format!("{list}.{}", self.flat_index(place, encoder))
        } else if place.is_block(self.blocks(encoder)) {
            format!("{list}.{stage}.resnets.{module}")
        } else {
            format!("{list}.{stage}.{}", self.diffusers_resampler(encoder))
        }
    }

    fn flat_index(&self, place: &Place<'_>, encoder: bool) -> usize {
        // No overflow: both come from an index of at most four digits.
        place.stage * (self.blocks(encoder) + 1) + place.module
    }

    fn diffusers_resampler(&self, encoder: bool) -> &'static str {
        match (encoder, self.nested) {
            (true, _) => "downsampler",
            (false, true) => "upsampler",
            (false, false) => "upsamplers.0",
        }
    }
}

/// A part of a block or resampler.
struct Place<'a> {
    stage: usize,
    /// Number inside the stage; the resampler comes last.
    module: usize,
    piece: &'a str,
}

impl Place<'_> {
    fn is_block(&self, blocks: usize) -> bool {
        self.module < blocks
    }
}

impl From {
    /// The layout that a name is taken from, then the other.
    fn order<T>(self, original: T, diffusers: T) -> (T, T) {
        match self {
            Self::Original => (original, diffusers),
            Self::Diffusers => (diffusers, original),
        }
    }
}

fn translate(piece: &str, pairs: &[Pair], from: From) -> Option<&'static str> {
    pairs
        .iter()
        .map(|&(original, diffusers)| from.order(original, diffusers))
        .find(|(here, _)| *here == piece)
        .map(|p| p.1)
}

/// The number before the next full stop, and what follows; no leading zeros, at most four digits.
pub(crate) fn index(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_once('.')?;
    let canonical = matches!(digits.len(), 1..=4)
        && digits.bytes().all(|b| b.is_ascii_digit())
        && (digits.len() == 1 || !digits.starts_with('0'));
    if canonical { Some((digits.parse().ok()?, rest)) } else { None }
}

#[cfg(test)]
mod tests;
