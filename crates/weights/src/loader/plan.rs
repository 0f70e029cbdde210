//! The comparison of what a model needs with what a source holds.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
};

use crate::{
    dtype::StoredDType,
    error::{Error, Result, count, list, shown},
    gguf::GgmlType,
    inspect,
    quant::Quantisation,
    source::{TensorInfo, TensorSource},
};

/// A tensor that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Name in the file.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
}

impl Expected {
    /// From name and extents.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into() }
    }

    /// Reads a table of names: a line per tensor, name, tab, extents separated by commas (nothing for a scalar). Empty
    /// lines and lines that start with `#` are skipped.
    ///
    /// # Errors
    /// [`Error::NameTable`] with the line.
    pub fn from_table(text: &str) -> Result<Vec<Self>> {
        let mut table = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
            let refuse = |problem: String| Error::NameTable { line: i + 1, problem };
            let Some((name, extents)) = line.split_once('\t') else {
                return Err(refuse(format!("no tab in `{}`", shown(line))));
            };
            let shape = extents.split(',').filter(|_| !extents.is_empty());
            let shape: Result<Vec<usize>, _> = shape.map(str::parse).collect();
            let shape = shape.map_err(|_| refuse(format!("`{}` is not a list of extents", shown(extents))))?;
            table.push(Self::new(name, shape));
        }
        Ok(table)
    }
}

/// A tensor with another shape than expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misshapen {
    /// Name.
    pub name: String,
    /// Shape in the file.
    pub found: Vec<usize>,
    /// Shape that the model needs.
    pub expected: Vec<usize>,
}

/// A tensor whose element type or quantisation cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Name.
    pub name: String,
    /// Element type in the file.
    pub dtype: StoredDType,
    /// How it is quantised, if it is.
    pub quantisation: Option<Quantisation>,
}

/// `blk.0.weight is IQ3_S (type 21)`, `proj.weight is nvfp4`, `proj.weight is I8`.
impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.quantisation {
            Some(Quantisation::Ggml(blocks)) => write!(f, "{} is {blocks} (type {})", self.name, blocks.id()),
            Some(other) => write!(f, "{} is {other}", self.name),
            None => write!(f, "{} is {}", self.name, self.dtype),
        }
    }
}

/// Prefixes under which other programs store the same tensors.
pub const KNOWN_PREFIXES: &[&str] =
    &["model.diffusion_model.", "diffusion_model.", "transformer.", "first_stage_model.", "vae.", "model."];

/// All differences between a plan and a source.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PlanReport {
    /// Expected names that the source lacks, in the order of the plan.
    pub missing: Vec<String>,
    /// Tensors of another shape.
    pub misshapen: Vec<Misshapen>,
    /// Tensors of the source that nothing expects or ignores, sorted.
    pub unexpected: Vec<String>,
    /// Tensors of a type that cannot be converted.
    pub unusable: Vec<Unusable>,
    /// Names that stand twice in the plan: a fault of the model's code.
    pub repeated: Vec<String>,
    /// What would make it fit, or what the file looks like instead.
    pub hint: Option<String>,
}

impl PlanReport {
    /// Compares. `loadable` says whether a tensor's values can be converted.
    pub fn new(
        source: &dyn TensorSource,
        expected: &[Expected],
        ignored: impl Fn(&str) -> bool,
        loadable: impl Fn(&TensorInfo) -> bool,
    ) -> Self {
        let mut report = Self::default();
        let mut known = HashSet::with_capacity(expected.len());
        for e in expected {
            if !known.insert(e.name.as_str()) {
                report.repeated.push(e.name.clone());
                continue;
            }
            match source.info(&e.name) {
                None => report.missing.push(e.name.clone()),
                Some(t) => {
                    // The extents of codes that are not understood mean nothing.
                    let understood = t.quantisation.as_ref().is_none_or(Quantisation::is_supported);
                    if t.shape != e.shape && understood {
                        let (found, expected) = (t.shape.clone(), e.shape.clone());
                        report.misshapen.push(Misshapen { name: e.name.clone(), found, expected });
                    }
                    if !loadable(t) {
                        let quantisation = t.quantisation.clone();
                        report.unusable.push(Unusable { name: e.name.clone(), dtype: t.dtype, quantisation });
                    }
                }
            }
        }
        report.unexpected = source
            .tensors()
            .iter()
            .filter(|t| !known.contains(t.name.as_str()) && !ignored(&t.name))
            .map(|t| t.name.clone())
            .collect();
        if !report.missing.is_empty() || !report.misshapen.is_empty() {
            report.hint = split_hint(source)
                .or_else(|| prefix_hint(source, expected))
                .or_else(|| kind_hint(source, &report, expected.len()));
        }
        report
    }

    /// Whether there is no difference.
    pub fn fits(&self) -> bool {
        let Self { missing, misshapen, unexpected, unusable, repeated, hint: _ } = self;
        missing.is_empty()
            && misshapen.is_empty()
            && unexpected.is_empty()
            && unusable.is_empty()
            && repeated.is_empty()
    }
}

/// One line: counts, the first names of each kind, the hint.
impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let mut part = |n: usize, what: &str, names: String| {
            if n > 0 {
                parts.push(format!("{} {what} ({names})", count(n, "tensor")));
            }
        };
        part(self.missing.len(), "missing", list(&self.missing));
        let shapes = self.misshapen.iter().map(|m| format!("{} is {:?}, needs {:?}", m.name, m.found, m.expected));
        part(self.misshapen.len(), "of another shape", list(shapes));
        part(self.unexpected.len(), "unexpected", list(&self.unexpected));
        part(self.unusable.len(), "of an unusable type", list(self.unusable.iter().map(ToString::to_string)));
        part(self.repeated.len(), "planned twice", list(&self.repeated));
        f.write_str(&parts.join("; "))?;
        if self.unusable.iter().any(|u| matches!(u.quantisation, Some(Quantisation::Ggml(_)))) {
            write!(f, "; supported GGUF types: {}", GgmlType::supported())?;
        }
        if self.unusable.iter().any(|u| matches!(u.quantisation, Some(Quantisation::Unsupported(_)))) {
            write!(f, "; supported quantisations: {}", Quantisation::supported())?;
        }
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

/// Whether this is one of the files that `llama-gguf-split` makes of one.
fn split_hint(source: &dyn TensorSource) -> Option<String> {
    let number = |key: &str| source.metadata().get(key)?.parse::<u16>().ok();
    let count = number("split.count").filter(|&count| count > 1)?;
    let part = u32::from(number("split.no")?) + 1;
    Some(format!("this is part {part} of {count} of a split model: join them with `llama-gguf-split --merge`"))
}

/// Whether removing or adding a known prefix makes every expected tensor fit.
fn prefix_hint(source: &dyn TensorSource, expected: &[Expected]) -> Option<String> {
    let fits = |by_name: &BTreeMap<&str, &TensorInfo>, name: &dyn Fn(&Expected) -> Option<String>| {
        expected
            .iter()
            .all(|e| name(e).and_then(|n| by_name.get(n.as_str()).copied()).is_some_and(|t| t.shape == e.shape))
    };
    if expected.is_empty() {
        return None;
    }
    let all: BTreeMap<&str, &TensorInfo> = source.tensors().iter().map(|t| (t.name.as_str(), t)).collect();
    for &prefix in KNOWN_PREFIXES {
        if fits(&all, &|e| Some(format!("{prefix}{}", e.name))) {
            return Some(format!(
                "every expected tensor is there under the prefix `{prefix}`, which would have to be removed"
            ));
        }
        if fits(&all, &|e| e.name.strip_prefix(prefix).map(str::to_owned)) {
            return Some(format!(
                "every expected tensor is there without the prefix `{prefix}`, which would have to be added"
            ));
        }
    }
    None
}

/// What the file looks like, if hardly anything in it fits.
fn kind_hint(source: &dyn TensorSource, report: &PlanReport, expected: usize) -> Option<String> {
    if (report.missing.len() + report.misshapen.len()) * 2 < expected {
        return None;
    }
    inspect::recognise(source.tensors()).map(|guess| format!("the file looks like {}", guess.describe()))
}
