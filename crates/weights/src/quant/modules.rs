//! Which side tensors belong to which matrix, and what the two make together.

use std::collections::{HashMap, HashSet};

use candle_fork::quant::Fp8Format;

use super::{
    Granularity, Quantisation, format,
    marker::{METADATA_KEY, Marker, from_metadata},
    matrix, refuse, scales,
};
use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
    source::{TensorInfo, TensorSource},
};

/// A quantised tensor and the names of what its values are computed from.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) quantisation: Quantisation,
    /// Extents of its values.
    pub(super) shape: Vec<usize>,
    /// The scale, if there is one; of the 4-bit formats the one of the rows.
    pub(super) scale: Option<String>,
    /// Scales of groups of columns, of the 4-bit formats.
    pub(super) relative: Option<String>,
    /// Values of the codes, of the 4-bit formats.
    pub(super) codebook: Option<String>,
}

/// What a source holds besides plain tensors.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// Quantised tensors by name.
    pub(super) modules: HashMap<String, Module>,
    /// Side tensors: they belong to a matrix and are no tensors of the model.
    pub(super) hidden: HashSet<String>,
}

/// A tensor that only says that the file's matrices are scaled.
const FILE_MARKER: &str = "scaled_fp8";

/// Scales of weights, as different writers name them.
const WEIGHT_SCALES: [&str; 3] = ["weight_scale", "scale_weight", "weight_scale_inv"];

/// Scales of activations: products in floating point need none.
const INPUT_SCALES: [&str; 2] = ["input_scale", "scale_input"];

/// What else stands beside matrices of the formats that are recognised, also those that are not supported.
const OTHER_SIDES: [&str; 15] = [
    "comfy_quant",
    "weight_scale_2",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
    "weight_correction",
    "weight_zeros",
    "pre_quant_scale",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4",
    "weight.quant_state.bitsandbytes__fp4",
    "SCB",
];

impl Modules {
    /// Looks through names, element types and markers; of the large tensors nothing is read.
    pub(super) fn find(source: &dyn TensorSource) -> Result<Self> {
        let described = match source.metadata().get(METADATA_KEY) {
            Some(text) => from_metadata(text).map_err(|problem| Error::Json {
                file: source.describe().to_owned(),
                message: format!("the metadata `{METADATA_KEY}` {problem}"),
            })?,
            None => HashMap::new(),
        };
        let mut this = Self::default();
        for weight in source.tensors() {
            let prefix = weight.name.strip_suffix("weight").filter(|p| p.is_empty() || p.ends_with('.'));
            if let (Some(prefix), None) = (prefix, &weight.quantisation) {
                let marker = described.get(prefix.trim_end_matches('.'));
                this.add(Beside { source, weight, prefix, marker }.module()?, weight, source, prefix);
            }
        }
        // A file that was cast as a whole has biases and the like in 8 bits too.
        for tensor in source.tensors() {
            if let Some(format) = fp8_format(tensor.dtype)
                && !this.is_known(&tensor.name)
                && !is_file_marker(&tensor.name)
            {
                let quantisation = fp8(format, Granularity::Unscaled, false);
                this.modules.insert(tensor.name.clone(), Module::new(quantisation, tensor.shape.clone(), None));
            }
        }
        if this.modules.values().any(|m| m.scale.is_some()) {
            let markers = source.tensors().iter().filter(|t| is_file_marker(&t.name));
            this.hidden.extend(markers.map(|t| t.name.clone()));
        }
        Ok(this)
    }

    fn is_known(&self, name: &str) -> bool {
        self.modules.contains_key(name) || self.hidden.contains(name)
    }

    /// Takes a matrix and what belongs to it.
    fn add(&mut self, found: Found, weight: &TensorInfo, source: &dyn TensorSource, prefix: &str) {
        let (module, used) = match found {
            Found::Plain { used } if used.is_empty() => return,
            Found::Plain { used } => (None, used),
            Found::Quantised { module, used } => (Some(module), used),
        };
        let unsupported = module.as_ref().is_some_and(|m| !m.quantisation.is_supported());
        let others = WEIGHT_SCALES.iter().chain(&OTHER_SIDES).filter(|_| unsupported);
        let sides = used.iter().chain(&INPUT_SCALES).chain(others).map(|side| format!("{prefix}{side}"));
        self.hidden.extend(sides.filter(|side| source.info(side).is_some()));
        if let Some(module) = module {
            self.modules.insert(weight.name.clone(), module);
        }
    }
}

impl Module {
    fn new(quantisation: Quantisation, shape: Vec<usize>, scale: Option<String>) -> Self {
        Self { quantisation, shape, scale, relative: None, codebook: None }
    }
}

fn is_file_marker(name: &str) -> bool {
    name.strip_suffix(FILE_MARKER).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn fp8_format(dtype: StoredDType) -> Option<Fp8Format> {
    match dtype {
        StoredDType::F8E4M3 => Some(Fp8Format::E4M3),
        StoredDType::F8E5M2 => Some(Fp8Format::E5M2),
        _ => None,
    }
}

fn fp8(format: Fp8Format, scales: Granularity, full_precision: bool) -> Quantisation {
    Quantisation::Fp8 { format, scales, full_precision }
}

/// What a tensor named `weight` turns out to be, and the names of its side tensors behind the common prefix.
enum Found {
    Plain { used: Vec<&'static str> },
    Quantised { module: Module, used: Vec<&'static str> },
}

/// A tensor and what stands beside it under the same prefix.
struct Beside<'a> {
    source: &'a dyn TensorSource,
    weight: &'a TensorInfo,
    /// Up to the last dot, with it.
    prefix: &'a str,
    /// What the metadata says.
    marker: Option<&'a Marker>,
}

impl Beside<'_> {
    fn module(&self) -> Result<Found> {
        // A marker of its own comes before the one of the file.
        let own = match self.side("comfy_quant") {
            Some(info) if info.dtype == StoredDType::U8 => {
                let marker = Marker::parse(self.source.bytes(&info.name)?);
                Some(marker.map_err(|problem| refuse(self.source, info, problem))?)
            }
            Some(info) => return Err(refuse(self.source, info, format!("is {}, a marker is U8", info.dtype))),
            None => None,
        };
        match own.as_ref().or(self.marker) {
            Some(marker) => {
                let (module, mut used) = self.marked(marker)?;
                used.push("comfy_quant");
                Ok(Found::Quantised { module, used })
            }
            None => self.unmarked(),
        }
    }

    /// By the format that the file names.
    fn marked(&self, marker: &Marker) -> Result<(Module, Vec<&'static str>)> {
        let full_precision = marker.full_precision;
        match marker.format.as_str() {
            format::INT8 => {
                self.stored_as(&[StoredDType::I8], &marker.format)?;
                let (scale, granularity) = self.scale("weight_scale", false)?;
                self.group(marker.group, matrix(&self.weight.shape)[1])?;
                let quantisation = Quantisation::Int8 { group: marker.group, scales: granularity, full_precision };
                Ok((Module::new(quantisation, self.weight.shape.clone(), Some(scale)), vec!["weight_scale"]))
            }
            name @ (format::E4M3 | format::E5M2) => {
                let stored = if name == format::E4M3 { StoredDType::F8E4M3 } else { StoredDType::F8E5M2 };
                self.stored_as(&[stored], name)?;
                let (scale, granularity) = self.scale("weight_scale", true)?;
                let format = if name == format::E4M3 { Fp8Format::E4M3 } else { Fp8Format::E5M2 };
                let quantisation = fp8(format, granularity, full_precision);
                Ok((Module::new(quantisation, self.weight.shape.clone(), Some(scale)), vec!["weight_scale"]))
            }
            format::W4A4 => self.w4a4(marker),
            format::W4A8 => self.w4a8(marker),
            other => Ok((self.unsupported(&shown(other)), Vec::new())),
        }
    }

    fn w4a4(&self, marker: &Marker) -> Result<(Module, Vec<&'static str>)> {
        self.stored_as(&[StoredDType::I8, StoredDType::U8], format::W4A4)?;
        let (rows, width) = self.rank_2(format::W4A4)?;
        let shape = vec![rows, width.saturating_mul(2)];
        let (scale, _) = self.scale("weight_scale", false)?;
        let group = marker.group_if_rotated;
        self.group(Some(group), shape[1])?;
        Ok((Module::new(Quantisation::W4A4 { group }, shape, Some(scale)), vec!["weight_scale"]))
    }

    fn w4a8(&self, marker: &Marker) -> Result<(Module, Vec<&'static str>)> {
        self.stored_as(&[StoredDType::I8, StoredDType::U8], format::W4A8)?;
        if self.side("weight_correction").is_some() {
            return Ok((self.unsupported("asym_w4a8_int8 with weight_correction"), Vec::new()));
        }
        let (rows, width) = self.rank_2(format::W4A8)?;
        let relative = self.need("weight_s_rel")?;
        let scale_group = marker.scale_group;
        let columns = match *relative.shape.as_slice() {
            [n, groups] if n == rows => groups.saturating_mul(scale_group),
            _ => return Err(scales::misfit(self.source, self.weight, relative)),
        };
        let bits = match columns {
            0 => return Err(scales::misfit(self.source, self.weight, relative)),
            _ if width.checked_mul(2) == Some(columns) => 4,
            _ if width.checked_mul(4) == columns.checked_mul(3) => 6,
            _ => return Err(scales::misfit(self.source, self.weight, relative)),
        };
        let (scale, _) = self.scale("weight_s_channel", false)?;
        let codebook = self.side("weight_codebook").map(|info| info.name.clone());
        // Always rotated: the marker has the group and no flag.
        let group = Some(marker.group_if_rotated);
        self.group(group, columns)?;
        let module = Module {
            relative: Some(relative.name.clone()),
            codebook,
            ..Module::new(Quantisation::W4A8 { bits, scale_group, group }, vec![rows, columns], Some(scale))
        };
        Ok((module, vec!["weight_s_rel", "weight_s_channel", "weight_codebook"]))
    }

    /// By element type and names alone.
    fn unmarked(&self) -> Result<Found> {
        let found: Vec<_> = WEIGHT_SCALES.into_iter().filter(|side| self.side(side).is_some()).collect();
        let (weight, dtype) = (self.weight, self.weight.dtype);
        if let Some(format) = fp8_format(dtype) {
            let (scale, granularity) = match *found.as_slice() {
                [] => (None, Granularity::Unscaled),
                [side] => {
                    // Powers of two: the scales of a microscaling format, in an order of its own.
                    if self.side(side).is_some_and(|s| matches!(s.dtype, StoredDType::U8 | StoredDType::F8E8M0)) {
                        return Ok(Found::Quantised { module: self.unsupported("mxfp8"), used: Vec::new() });
                    }
                    let (scale, granularity) = self.scale(side, true)?;
                    (Some(scale), granularity)
                }
                _ => return Err(refuse(self.source, weight, format!("has several scales: {}", found.join(", ")))),
            };
            let module = Module::new(fp8(format, granularity, false), weight.shape.clone(), scale);
            return Ok(Found::Quantised { module, used: found });
        }
        let unsupported = match dtype {
            StoredDType::I8 if self.side("SCB").is_some() => Some("bitsandbytes"),
            StoredDType::I8 if !found.is_empty() => Some("int8 without a comfy_quant marker"),
            StoredDType::U8 if self.side("weight_scale_2").is_some() => Some("nvfp4"),
            StoredDType::U8 if self.side("weight.absmax").is_some() => Some("bitsandbytes"),
            _ => None,
        };
        if let Some(format) = unsupported {
            return Ok(Found::Quantised { module: self.unsupported(format), used: Vec::new() });
        }
        // Files that scale every matrix have a scale of 1 beside those that they did not quantise.
        if !found.is_empty() && matches!(dtype, StoredDType::F32 | StoredDType::F16 | StoredDType::BF16) {
            for side in &found {
                let name = format!("{}{side}", self.prefix);
                if scales::single(self.source, &name)? != 1.0 {
                    let problem = format!("is {dtype}, but `{}` scales it", shown(&name));
                    return Err(refuse(self.source, weight, problem));
                }
            }
            return Ok(Found::Plain { used: found });
        }
        Ok(Found::Plain { used: Vec::new() })
    }

    fn side(&self, suffix: &str) -> Option<&TensorInfo> {
        self.source.info(&format!("{}{suffix}", self.prefix))
    }

    fn need(&self, suffix: &str) -> Result<&TensorInfo> {
        let missing = || refuse(self.source, self.weight, format!("is quantised, but `{suffix}` is missing beside it"));
        self.side(suffix).ok_or_else(missing)
    }

    /// Name and granularity of a scale that has to be there.
    fn scale(&self, suffix: &str, blocks: bool) -> Result<(String, Granularity)> {
        let scale = self.need(suffix)?;
        let granularity = scales::granularity(&scale.shape, matrix(&self.weight.shape), blocks);
        let granularity = granularity.ok_or_else(|| scales::misfit(self.source, self.weight, scale))?;
        Ok((scale.name.clone(), granularity))
    }

    fn stored_as(&self, dtypes: &[StoredDType], format: &str) -> Result<()> {
        if dtypes.contains(&self.weight.dtype) {
            return Ok(());
        }
        let problem = format!("is {}, but its marker says {format}", self.weight.dtype);
        Err(refuse(self.source, self.weight, problem))
    }

    fn rank_2(&self, format: &str) -> Result<(usize, usize)> {
        match *self.weight.shape.as_slice() {
            [rows, width] => Ok((rows, width)),
            _ => {
                let problem = format!("has shape {:?}, {format} is for matrices", self.weight.shape);
                Err(refuse(self.source, self.weight, problem))
            }
        }
    }

    fn group(&self, group: Option<usize>, columns: usize) -> Result<()> {
        match group {
            Some(g) if !matches!(g, 4 | 16 | 64 | 256 | 1024) || !columns.is_multiple_of(g) => {
                let problem =
                    format!("of {columns} columns cannot be rotated in groups of {g} (4, 16, 64, 256 or 1024)");
                Err(refuse(self.source, self.weight, problem))
            }
            _ => Ok(()),
        }
    }

    fn unsupported(&self, format: &str) -> Module {
        Module::new(Quantisation::Unsupported(format.to_owned()), self.weight.shape.clone(), None)
    }
}
