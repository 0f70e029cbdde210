//! Other programs' names: a source seen under the names of a model.
//!
//! The tables belong to the models; here is what they can say. Rows of a matrix lie one after another in every format, so
//! that a part of a fused matrix is a range of its bytes, whatever they mean, and nothing is copied.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, OnceLock},
};

use candle_fork::{HostBytes, quant::QuantWeight};

use crate::{
    error::{Error, Result, shown},
    loader::KNOWN_PREFIXES,
    source::{SourceFile, TensorInfo, TensorSource},
};

/// How a tensor of a model is taken from a tensor of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Take {
    /// All of it.
    Whole,
    /// One of several equal runs of rows: the matrix is fused.
    Part {
        /// Which, from 0.
        index: usize,
        /// How many there are.
        of: usize,
    },
    /// Its second half of rows, then its first.
    SwappedHalves,
    /// All of it, as a matrix: extents of 1 behind the second are dropped.
    Matrix,
}

/// A tensor of a model as part of a tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Name in the model.
    pub name: String,
    /// What is taken.
    pub take: Take,
}

impl View {
    /// From name and part.
    pub fn new(name: impl Into<String>, take: Take) -> Self {
        Self { name: name.into(), take }
    }

    /// The rows of a fused matrix: equal parts, in order.
    pub fn parts(names: impl IntoIterator<Item = String, IntoIter: ExactSizeIterator>) -> Vec<Self> {
        let names = names.into_iter();
        let of = names.len();
        names.enumerate().map(|(index, name)| Self::new(name, Take::Part { index, of })).collect()
    }
}

/// Shows `source` under other names. `views` says for each of its tensors which tensors of the model it holds: none at all
/// (`Some` of an empty list) hides it; `None` leaves it as it is, and so does a shape that cannot be divided or a part that it
/// has not, so that a plan reports each.
///
/// # Errors
/// [`Error::TwoNames`] if two tensors of the file would be the same tensor of the model.
pub fn translate(
    source: Arc<dyn TensorSource>,
    views: impl Fn(&TensorInfo) -> Option<Vec<View>>,
) -> Result<Arc<dyn TensorSource>> {
    let mut found = Vec::with_capacity(source.tensors().len());
    for (from, info) in source.tensors().iter().enumerate() {
        let taken: Option<Vec<_>> =
            views(info).and_then(|views| views.into_iter().map(|view| Seen::new(info, from, view)).collect());
        match taken {
            Some(taken) => found.extend(taken),
            None => found.push(Seen { info: info.clone(), from, rows: None, copy: OnceLock::new(), swapped: false }),
        }
    }
    found.sort_by(|a, b| a.info.name.cmp(&b.info.name));
    if let Some(pair) = found.windows(2).find(|pair| pair[0].info.name == pair[1].info.name) {
        let name = |seen: &Seen| shown(&source.tensors()[seen.from].name);
        let file = source.describe().to_owned();
        return Err(Error::TwoNames { file, first: name(&pair[0]), second: name(&pair[1]) });
    }
    let tensors = found.iter().map(|seen| seen.info.clone()).collect();
    Ok(Arc::new(Translated { source, tensors, found }))
}

/// The prefix under which a source holds one of `names`: none, or one of [`KNOWN_PREFIXES`].
pub fn prefix_of(source: &dyn TensorSource, names: &[&str]) -> Option<&'static str> {
    let holds = |prefix: &&&str| names.iter().any(|name| source.info(&format!("{prefix}{name}")).is_some());
    [""].iter().chain(KNOWN_PREFIXES).find(holds).copied()
}

/// A tensor under its new name.
struct Seen {
    info: TensorInfo,
    /// Index of the file's tensor in the source.
    from: usize,
    /// First row and number of rows, unless it is all of them.
    rows: Option<(usize, usize)>,
    swapped: bool,
    /// The bytes in their new order, made when they are asked for.
    copy: OnceLock<HostBytes>,
}

impl Seen {
    fn new(info: &TensorInfo, from: usize, view: View) -> Option<Self> {
        let mut info = TensorInfo { name: view.name, ..info.clone() };
        let rows = info.shape.first().copied();
        // Bytes of so many rows.
        let share = |of: usize| {
            let rows = rows.filter(|rows| of > 0 && rows.is_multiple_of(of) && info.bytes.len().is_multiple_of(of))?;
            Some((rows / of, info.bytes.len() / of))
        };
        let mut taken = None;
        match view.take {
            Take::Whole => {}
            Take::Part { index, of } => {
                let (rows, bytes) = share(of).filter(|_| index < of)?;
                let start = info.bytes.start + index * bytes;
                info.bytes = start..start + bytes;
                *info.shape.first_mut()? = rows;
                taken = Some((index * rows, rows));
            }
            Take::SwappedHalves => {
                share(2)?;
            }
            Take::Matrix => {
                let extents = info.shape.iter().rposition(|&d| d != 1).map_or(0, |last| last + 1);
                info.shape.truncate(extents.max(2));
            }
        }
        Some(Self { info, from, rows: taken, swapped: view.take == Take::SwappedHalves, copy: OnceLock::new() })
    }
}

/// See [`translate`].
struct Translated {
    source: Arc<dyn TensorSource>,
    /// Sorted by name.
    tensors: Vec<TensorInfo>,
    /// By the same index.
    found: Vec<Seen>,
}

impl Translated {
    fn find(&self, name: &str) -> Result<(&Seen, &TensorInfo)> {
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name));
        let missing = || Error::NoSuchTensor { file: self.describe().to_owned(), tensor: shown(name) };
        let seen = found.ok().and_then(|i| self.found.get(i)).ok_or_else(missing)?;
        Ok((seen, &self.source.tensors()[seen.from]))
    }

    /// The bytes of a tensor whose halves are exchanged.
    fn swapped(&self, seen: &Seen, file: &TensorInfo) -> Result<HostBytes> {
        let bytes = self.source.bytes(&file.name)?;
        let copy = seen.copy.get_or_init(|| {
            let (first, second) = bytes.split_at(bytes.len() / 2);
            Arc::new([second, first].concat())
        });
        Ok(copy.clone())
    }

    /// A tensor's bytes within those of the file's tensor.
    fn range(seen: &Seen, file: &TensorInfo) -> Range<usize> {
        let start = seen.info.bytes.start - file.bytes.start;
        start..start + seen.info.bytes.len()
    }
}

impl TensorSource for Translated {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        self.source.files()
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (seen, file) = self.find(name)?;
        if seen.swapped {
            self.swapped(seen, file)?;
            return Ok(seen.copy.get().map_or(&[], |copy| (**copy).as_ref()));
        }
        Ok(&self.source.bytes(&file.name)?[Self::range(seen, file)])
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        let (seen, file) = self.find(name)?;
        if seen.swapped {
            let copy = self.swapped(seen, file)?;
            let len = (*copy).as_ref().len();
            return Ok((copy, 0..len));
        }
        let (owner, whole) = self.source.shared(&file.name)?;
        let part = Self::range(seen, file);
        Ok((owner, whole.start + part.start..whole.start + part.end))
    }

    fn quant(&self, name: &str) -> Result<QuantWeight> {
        let (seen, file) = self.find(name)?;
        let weight = self.source.quant(&file.name)?;
        let taken = match seen.rows {
            Some((start, len)) => weight.rows(start, len),
            None if seen.swapped => {
                let rows = u32::try_from(weight.out_features()).map_err(|_| Error::Quantised {
                    file: self.file_of(&seen.info).to_owned(),
                    tensor: shown(name),
                    problem: "has more rows than can be numbered".to_owned(),
                })?;
                weight.gather(&(rows / 2..rows).chain(0..rows / 2).collect::<Vec<_>>())
            }
            None => Ok(weight),
        };
        taken.map_err(|source| Error::Tensor {
            file: self.file_of(&seen.info).to_owned(),
            tensor: shown(name),
            source: Box::new(source),
        })
    }

    fn describe(&self) -> &str {
        self.source.describe()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }
}
