//! Attention as a graph: `o = softmax(scale q k^T) v`.
//!
//! | form | operations | versions |
//! |---|---|---|
//! | [`Form::Unified`] | one | from 9.13.1 |
//! | [`Form::Composite`] | product, scale, maximum, difference, exponential, sum, logarithm, log-sum-exp, quotient, product | before |
//!
//! Both run as one kernel that is compiled at run time. The log-sum-exp of the composite is written though nobody wants
//! it: the same graph without it is refused.

use super::{
    descriptor::{Descriptor, Finalised},
    graph::{ALIGNMENT, Describer, Element, TensorSpec},
    library::{Library, Version},
    refusal::Failure,
    sys::{RawHandle, attribute, descriptor, pointwise, reduction},
};

/// The first version with the unified operation in its final form.
const UNIFIED: Version = Version(91_301);

/// The first version in which the composite is known to be accepted.
const OLDEST: Version = Version(90_800);

/// The least compute capability for which there are kernels.
const CAPABILITY: u32 = 800;

/// Widest head for which plans have been seen.
const WIDEST: i64 = 512;

/// Which operations describe attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// The operation of its own.
    Unified,
    /// Products, pointwise operations and reductions.
    Composite,
}

impl Form {
    /// The form that a version understands best.
    pub(super) fn of(version: Version) -> Self {
        if version >= UNIFIED { Form::Unified } else { Form::Composite }
    }
}

/// Attention of all queries to all keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttentionSpec {
    /// Type of q, k, v and o: f16 or bf16.
    pub(crate) element: Element,
    /// Queries `[B, H, Sq, D]`.
    pub(crate) q: TensorSpec,
    /// Keys `[B, Hkv, Sk, D]`; Hkv divides H.
    pub(crate) k: TensorSpec,
    /// Values, of the shape of the keys.
    pub(crate) v: TensorSpec,
    /// Result, of the shape of the queries.
    pub(crate) o: TensorSpec,
    /// Operations.
    pub(crate) form: Form,
}

/// Names of the tensors.
mod id {
    pub(super) const Q: i64 = 1;
    pub(super) const K: i64 = 2;
    pub(super) const V: i64 = 3;
    pub(super) const O: i64 = 4;
    pub(super) const SCALE: i64 = 5;
    pub(super) const STATISTICS: i64 = 6;
    pub(super) const PRODUCTS: i64 = 10;
    pub(super) const SCORES: i64 = 11;
    pub(super) const MAXIMUM: i64 = 12;
    pub(super) const DIFFERENCES: i64 = 13;
    pub(super) const EXPONENTIALS: i64 = 14;
    pub(super) const SUM: i64 = 15;
    pub(super) const LOGARITHM: i64 = 16;
    pub(super) const WEIGHTS: i64 = 17;
}

impl AttentionSpec {
    /// Ids of the tensors that an execution is given, in its order: q, k, v, o, the scale (an f32 of the host), and in the
    /// composite form an f32 for each query of each head, which is written.
    pub(super) fn operands(&self) -> &'static [i64] {
        match self.form {
            Form::Unified => &[id::Q, id::K, id::V, id::O, id::SCALE],
            Form::Composite => &[id::Q, id::K, id::V, id::O, id::SCALE, id::STATISTICS],
        }
    }

    /// Bytes of the statistics that an execution writes.
    pub(crate) fn statistics_bytes(&self) -> u64 {
        match self.form {
            Form::Unified => 0,
            Form::Composite => self.q.dims()[..3].iter().map(|n| n.unsigned_abs()).product::<u64>() * 4,
        }
    }

    /// Extents of the scores `[B, H, Sq, Sk]`.
    fn scores(&self) -> [i64; 4] {
        [self.q.dims()[0], self.q.dims()[1], self.q.dims()[2], self.k.dims()[2]]
    }

    /// Query heads, key heads.
    pub(super) fn heads(&self) -> (i64, i64) {
        (self.q.dims()[1], self.k.dims()[1])
    }

    /// Components of a head.
    pub(super) fn width(&self) -> i64 {
        self.q.dims()[3]
    }

    /// What the library has no kernel for, which it is not even asked.
    pub(super) fn unsupported(&self, version: Version, capability: u32) -> Option<String> {
        let width = self.width();
        if !self.element.is_half() {
            Some("attention in f32".to_owned())
        } else if width % 8 != 0 || width > WIDEST {
            Some(format!("heads of {width} components: multiples of 8 up to {WIDEST} are supported"))
        } else if capability < CAPABILITY {
            Some(format!("attention on compute capability {}.{}", capability / 100, capability % 100 / 10))
        } else if version < OLDEST {
            Some(format!("attention before version {OLDEST}"))
        } else {
            None
        }
    }

    pub(super) fn key(&self) -> String {
        let Self { element, q, k, v, o, form } = self;
        format!("attention {form:?} {element:?} q{q:?} k{k:?} v{v:?} o{o:?} align{ALIGNMENT}")
    }

    pub(super) fn describe(
        &self,
        library: &'static Library,
        handle: Option<RawHandle>,
    ) -> Result<(Finalised, Vec<Finalised>), Failure> {
        let describer = Describer { library, element: self.element };
        let mut keep = Vec::new();
        let operations = match self.form {
            Form::Unified => vec![self.unified(&describer, &mut keep)?],
            Form::Composite => self.composite(&describer, &mut keep)?,
        };
        let graph = describer.graph(&operations, handle)?;
        keep.extend(operations);
        Ok((graph, keep))
    }

    fn unified(&self, describer: &Describer, keep: &mut Vec<Finalised>) -> Result<Finalised, Failure> {
        let [q, k, v, o] = [
            describer.tensor(id::Q, &self.q)?,
            describer.tensor(id::K, &self.k)?,
            describer.tensor(id::V, &self.v)?,
            describer.tensor(id::O, &self.o)?,
        ];
        let scale = describer.scalar(id::SCALE, 4)?;
        let operation = Descriptor::new(describer.library, descriptor::OPERATION_SDPA_FORWARD)?
            .descriptors(attribute::SDPA_FORWARD_Q, &[&q])?
            .descriptors(attribute::SDPA_FORWARD_K, &[&k])?
            .descriptors(attribute::SDPA_FORWARD_V, &[&v])?
            .descriptors(attribute::SDPA_FORWARD_O, &[&o])?
            .descriptors(attribute::SDPA_FORWARD_SCALE, &[&scale])?
            .finalise();
        keep.extend([q, k, v, o, scale]);
        operation
    }

    fn composite(&self, describer: &Describer, keep: &mut Vec<Finalised>) -> Result<Vec<Finalised>, Failure> {
        let [b, h, queries, keys] = self.scores();
        let (all, rows) = (TensorSpec::packed(&[b, h, queries, keys]), TensorSpec::packed(&[b, h, queries, 1]));
        let q = describer.tensor(id::Q, &self.q)?;
        let k = describer.tensor(id::K, &self.k.transposed())?;
        let v = describer.tensor(id::V, &self.v)?;
        let o = describer.tensor(id::O, &self.o)?;
        let scale = describer.scalar(id::SCALE, 4)?;
        let statistics = describer.wide_tensor(id::STATISTICS, &rows)?;
        let products = describer.intermediate(id::PRODUCTS, &all)?;
        let scores = describer.intermediate(id::SCORES, &all)?;
        let maximum = describer.intermediate(id::MAXIMUM, &rows)?;
        let differences = describer.intermediate(id::DIFFERENCES, &all)?;
        let exponentials = describer.intermediate(id::EXPONENTIALS, &all)?;
        let sum = describer.intermediate(id::SUM, &rows)?;
        let logarithm = describer.intermediate(id::LOGARITHM, &rows)?;
        let weights = describer.narrow_intermediate(id::WEIGHTS, &all)?;
        let operations = vec![
            describer.multiply(&q, &k, &products, keep)?,
            describer.pointwise(pointwise::MUL, &products, Some(&scale), &scores, keep)?,
            describer.reduce(reduction::MAX, &scores, &maximum, keep)?,
            describer.pointwise(pointwise::SUB, &scores, Some(&maximum), &differences, keep)?,
            describer.pointwise(pointwise::EXP, &differences, None, &exponentials, keep)?,
            describer.reduce(reduction::ADD, &exponentials, &sum, keep)?,
            describer.pointwise(pointwise::LOG, &sum, None, &logarithm, keep)?,
            describer.pointwise(pointwise::ADD, &maximum, Some(&logarithm), &statistics, keep)?,
            describer.pointwise(pointwise::DIV, &exponentials, Some(&sum), &weights, keep)?,
            describer.multiply(&weights, &v, &o, keep)?,
        ];
        keep.extend([q, k, v, o, scale, statistics]);
        keep.extend([products, scores, maximum, differences, exponentials, sum, logarithm, weights]);
        Ok(operations)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;

    /// `[B, S, H, D]` in memory, cut from rows of `pitch` elements, in the order of the graph.
    pub(in crate::cudnn) fn rows(b: usize, s: usize, h: usize, d: usize, pitch: usize) -> TensorSpec {
        TensorSpec::new(&[b, h, s, d], &[s * pitch, d, pitch, 1]).unwrap()
    }

    /// Queries, keys and values cut from one projection of both.
    pub(in crate::cudnn) fn spec(
        element: Element,
        [b, queries, keys, heads, kv_heads, width]: [usize; 6],
        form: Form,
    ) -> AttentionSpec {
        let pitch = (heads + 2 * kv_heads) * width;
        let kv = rows(b, keys, kv_heads, width, pitch);
        AttentionSpec {
            element,
            q: rows(b, queries, heads, width, pitch),
            k: kv,
            v: kv,
            o: rows(b, queries, heads, width, heads * width),
            form,
        }
    }

    const SMALL: [usize; 6] = [2, 7, 9, 4, 2, 64];

    #[test]
    fn the_form_follows_the_version() {
        for (version, form) in [
            (90_800, Form::Composite),
            (91_300, Form::Composite),
            (91_301, Form::Unified),
            (91_900, Form::Unified),
            (92_800, Form::Unified),
        ] {
            assert_eq!(Form::of(Version(version)), form, "{version}");
        }
    }

    #[test]
    fn what_has_no_kernel_is_not_asked_for() {
        let (version, hopper) = (Version(91_900), 900);
        let at = |width: usize, element| {
            let [b, sq, sk, h, kv, _] = SMALL;
            spec(element, [b, sq, sk, h, kv, width], Form::Unified).unsupported(version, hopper)
        };
        for width in [8, 64, 72, 80, 128, 256, 512] {
            assert_eq!(at(width, Element::Bf16), None, "{width}");
        }
        for width in [1, 4, 60, 129, 300, 520] {
            assert!(at(width, Element::F16).is_some_and(|text| text.contains(&width.to_string())), "{width}");
        }
        assert!(at(64, Element::F32).is_some());
        let fine = spec(Element::Bf16, SMALL, Form::Composite);
        assert_eq!(fine.unsupported(version, 750), Some("attention on compute capability 7.5".into()));
        assert_eq!(fine.unsupported(Version(90_799), hopper), Some("attention before version 9.8.0".into()));
        assert_eq!(fine.unsupported(Version(90_800), 800), None);
    }

    #[test]
    fn statistics_exist_in_the_composite_alone() {
        let (unified, composite) =
            (spec(Element::Bf16, SMALL, Form::Unified), spec(Element::Bf16, SMALL, Form::Composite));
        assert_eq!((unified.statistics_bytes(), composite.statistics_bytes()), (0, 2 * 4 * 7 * 4));
        assert_eq!((unified.operands().len(), composite.operands().len()), (5, 6));
    }

    #[test]
    fn everything_that_changes_a_plan_changes_the_key() {
        let base = spec(Element::Bf16, SMALL, Form::Unified);
        let other = rows(2, 9, 2, 64, 1000);
        let all = [
            base,
            AttentionSpec { element: Element::F16, ..base },
            AttentionSpec { form: Form::Composite, ..base },
            AttentionSpec { q: rows(2, 7, 4, 64, 1000), ..base },
            AttentionSpec { k: other, ..base },
            AttentionSpec { v: other, ..base },
            AttentionSpec { o: rows(2, 7, 4, 64, 1000), ..base },
        ];
        assert_eq!(all.iter().map(AttentionSpec::key).collect::<HashSet<_>>().len(), all.len());
        let key = "attention Unified Bf16 q[2, 4, 7, 64]/[3584, 64, 512, 1] k[2, 2, 9, 64]/[4608, 64, 512, 1] \
                   v[2, 2, 9, 64]/[4608, 64, 512, 1] o[2, 4, 7, 64]/[1792, 64, 256, 1] align16";
        assert_eq!(base.key(), key);
    }

    #[test]
    fn keys_turn_by_their_strides() {
        let k = rows(2, 9, 2, 64, 512).transposed();
        assert_eq!((k.dims(), k.strides()), (&[2, 2, 64, 9][..], &[4608, 64, 1, 512][..]));
        assert_eq!(TensorSpec::packed(&[2, 3, 4]).strides(), [12, 4, 1]);
    }
}
