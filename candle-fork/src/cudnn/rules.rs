//! Which engines a policy lets run.

use std::{collections::BTreeMap, fmt};

use super::{
    graph::{Element, Graph},
    sys::{behavior, numerical},
};
use crate::cudnn_policy::{FallbackReason, Policy};

/// The part of a policy on which the choice of an engine depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Rules {
    pub(super) deterministic: bool,
    pub(super) allow_tf32: bool,
    pub(super) allow_transforms: bool,
    pub(super) allow_run_time_compiled: bool,
    pub(super) workspace_cap: u64,
}

/// What the library says about an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Notes {
    pub(super) numerical: Vec<i32>,
    pub(super) behavior: Vec<i32>,
}

/// Why an engine was passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Objection {
    DownConversion,
    Tf32,
    Transform,
    Nondeterministic,
    ReducedPrecision,
    RunTimeCompiled,
    Workspace,
    NotBuilt,
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Objection::DownConversion => "convert inputs down",
            Objection::Tf32 => "round to tf32",
            Objection::Transform => "use transformed domains",
            Objection::Nondeterministic => "are not deterministic",
            Objection::ReducedPrecision => "accumulate in less than f32",
            Objection::RunTimeCompiled => "are compiled at run time",
            Objection::Workspace => "need more workspace than allowed",
            Objection::NotBuilt => "could not be built",
        })
    }
}

impl Notes {
    pub(super) fn uses_tensor_cores(&self) -> bool {
        self.numerical.contains(&numerical::TENSOR_CORE)
    }

    pub(super) fn is_run_time_compiled(&self) -> bool {
        self.behavior.contains(&behavior::RUNTIME_COMPILATION)
    }
}

impl Rules {
    pub(super) fn of(policy: &Policy, graph: &Graph) -> Self {
        Self {
            deterministic: policy.deterministic,
            allow_tf32: policy.allow_tf32,
            allow_transforms: policy.allow_transforms,
            // What is compiled anyway is asked for by a switch of its own.
            allow_run_time_compiled: policy.allow_run_time_compiled || graph.is_compiled_at_run_time(),
            workspace_cap: policy.workspace_cap,
        }
    }

    /// Whether an engine may run. Half precision on tensor cores accumulates in f32, so the note says nothing there; for
    /// f32 it says TF32.
    pub(super) fn admit(&self, element: Element, notes: &Notes) -> Result<(), Objection> {
        const TRANSFORMS: [i32; 5] = [
            numerical::FFT,
            numerical::WINOGRAD,
            numerical::WINOGRAD_TILE_4X4,
            numerical::WINOGRAD_TILE_6X6,
            numerical::WINOGRAD_TILE_13X13,
        ];
        let noted = |note: &i32| notes.numerical.contains(note);
        if noted(&numerical::DOWN_CONVERT_INPUTS) {
            return Err(Objection::DownConversion);
        }
        if !element.is_half() && !self.allow_tf32 && notes.uses_tensor_cores() {
            return Err(Objection::Tf32);
        }
        if !element.is_half() && !self.allow_transforms && TRANSFORMS.iter().any(noted) {
            return Err(Objection::Transform);
        }
        if self.deterministic && noted(&numerical::NONDETERMINISTIC) {
            return Err(Objection::Nondeterministic);
        }
        if noted(&numerical::REDUCED_PRECISION_REDUCTION) {
            return Err(Objection::ReducedPrecision);
        }
        if !self.allow_run_time_compiled && notes.is_run_time_compiled() {
            return Err(Objection::RunTimeCompiled);
        }
        Ok(())
    }

    /// Whether a plan may have that much workspace.
    pub(super) fn admit_workspace(&self, bytes: u64) -> Result<(), Objection> {
        if bytes <= self.workspace_cap { Ok(()) } else { Err(Objection::Workspace) }
    }
}

/// How many engines were passed over, and why.
#[derive(Debug, Default)]
pub(super) struct Tally {
    objections: BTreeMap<Objection, usize>,
    /// What the library said last.
    pub(super) last_failure: Option<String>,
}

impl Tally {
    pub(super) fn add(&mut self, objection: Objection) {
        *self.objections.entry(objection).or_default() += 1;
    }

    /// The reason that a search which found nothing comes down to: short of workspace only if nothing else was missing.
    pub(super) fn reason(&self) -> FallbackReason {
        if self.objections.contains_key(&Objection::Workspace) {
            FallbackReason::Workspace
        } else if self.objections.contains_key(&Objection::NotBuilt) {
            FallbackReason::Failed
        } else {
            FallbackReason::Unsupported
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.objections.is_empty() {
            f.write_str("no engine was offered")?;
        }
        for (i, (objection, count)) in self.objections.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{count} engines {objection}")?;
        }
        self.last_failure.iter().try_for_each(|failure| write!(f, "; {failure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            attention::{self, Form},
            convolution::{Pattern, tests::same},
        },
        *,
    };

    fn of_convolution(policy: &Policy) -> Rules {
        Rules::of(policy, &(&same(Element::Bf16, Pattern::Plain, &[1, 8, 8, 8], 8, &[3, 3])).into())
    }

    fn notes(numerical: &[i32]) -> Notes {
        Notes { numerical: numerical.to_vec(), behavior: Vec::new() }
    }

    #[test]
    fn single_precision_is_true_single_precision_by_default() {
        let rules = of_convolution(&Policy::default());
        let f32 = |noted: &[i32]| rules.admit(Element::F32, &notes(noted));
        assert_eq!(f32(&[]), Ok(()));
        assert_eq!(f32(&[numerical::TENSOR_CORE]), Err(Objection::Tf32));
        assert_eq!(f32(&[numerical::TENSOR_CORE, numerical::DOWN_CONVERT_INPUTS]), Err(Objection::DownConversion));
        for transform in [numerical::FFT, numerical::WINOGRAD, numerical::WINOGRAD_TILE_13X13] {
            assert_eq!(f32(&[transform]), Err(Objection::Transform));
        }
        let relaxed = of_convolution(&Policy { allow_tf32: true, allow_transforms: true, ..Policy::default() });
        assert_eq!(relaxed.admit(Element::F32, &notes(&[numerical::TENSOR_CORE])), Ok(()));
        assert_eq!(relaxed.admit(Element::F32, &notes(&[numerical::WINOGRAD])), Ok(()));
        assert_eq!(
            relaxed.admit(Element::F32, &notes(&[numerical::DOWN_CONVERT_INPUTS])),
            Err(Objection::DownConversion)
        );
    }

    #[test]
    fn half_precision_takes_tensor_cores() {
        let rules = of_convolution(&Policy::default());
        for element in [Element::F16, Element::Bf16] {
            assert_eq!(rules.admit(element, &notes(&[numerical::TENSOR_CORE])), Ok(()));
            let reduced = [numerical::TENSOR_CORE, numerical::REDUCED_PRECISION_REDUCTION];
            assert_eq!(rules.admit(element, &notes(&reduced)), Err(Objection::ReducedPrecision));
        }
    }

    #[test]
    fn determinism_and_compilation_follow_the_policy() {
        let strict = of_convolution(&Policy::default());
        let loose =
            of_convolution(&Policy { deterministic: false, allow_run_time_compiled: true, ..Policy::default() });
        let loud = notes(&[numerical::TENSOR_CORE, numerical::NONDETERMINISTIC]);
        assert_eq!(strict.admit(Element::Bf16, &loud), Err(Objection::Nondeterministic));
        assert_eq!(loose.admit(Element::Bf16, &loud), Ok(()));
        let compiled = Notes { numerical: vec![], behavior: vec![behavior::RUNTIME_COMPILATION] };
        assert_eq!(strict.admit(Element::Bf16, &compiled), Err(Objection::RunTimeCompiled));
        assert_eq!(loose.admit(Element::Bf16, &compiled), Ok(()));
    }

    #[test]
    fn attention_is_always_compiled() {
        let spec = attention::tests::spec(Element::Bf16, [1, 8, 8, 1, 1, 64], Form::Unified);
        let rules = Rules::of(&Policy::default(), &(&spec).into());
        assert_eq!(rules, Rules { allow_run_time_compiled: true, ..of_convolution(&Policy::default()) });
    }

    #[test]
    fn the_workspace_is_capped() {
        let rules = of_convolution(&Policy { workspace_cap: 100, ..Policy::default() });
        assert_eq!(rules.admit_workspace(100), Ok(()));
        assert_eq!(rules.admit_workspace(101), Err(Objection::Workspace));
    }

    #[test]
    fn a_tally_tells_what_was_missing() {
        let mut tally = Tally::default();
        assert_eq!((tally.reason(), tally.to_string()), (FallbackReason::Unsupported, "no engine was offered".into()));
        tally.add(Objection::Tf32);
        tally.add(Objection::Tf32);
        assert_eq!(tally.reason(), FallbackReason::Unsupported);
        tally.add(Objection::NotBuilt);
        assert_eq!(tally.reason(), FallbackReason::Failed);
        tally.add(Objection::Workspace);
        tally.last_failure = Some("said so".into());
        assert_eq!(tally.reason(), FallbackReason::Workspace);
        let text = "2 engines round to tf32, 1 engines need more workspace than allowed, 1 engines could not be built; \
                    said so";
        assert_eq!(tally.to_string(), text);
    }
}
