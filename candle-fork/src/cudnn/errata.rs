//! Problems that some versions of cuDNN are known to compute wrongly.

use super::{graph::GraphSpec, library::Version};

/// One known defect.
#[derive(Debug)]
struct Erratum {
    /// First version that has it.
    from: Version,
    /// First version that has it no more.
    before: Version,
    /// Only f16 and bf16.
    half_only: bool,
    /// Axes of space, if the number matters.
    spatial: Option<usize>,
    /// Only filters with more than one tap.
    several_taps: bool,
    /// What goes wrong, and where it was reported.
    what: &'static str,
}

const ERRATA: &[Erratum] = &[Erratum {
    from: Version(90_800),
    before: Version(91_500),
    half_only: true,
    spatial: Some(3),
    several_taps: true,
    what: "half precision 3-d convolutions may be wrong (pytorch/pytorch#163539)",
}];

impl Erratum {
    fn concerns(&self, spec: &GraphSpec) -> bool {
        (!self.half_only || spec.element.is_half())
            && self.spatial.is_none_or(|axes| axes == spec.spatial())
            && (!self.several_taps || spec.taps().iter().any(|&taps| taps > 1))
    }

    fn covers(&self, version: Version) -> bool {
        (self.from..self.before).contains(&version)
    }
}

/// The defect that speaks against `spec` in `version`, if there is one.
pub(super) fn objection(spec: &GraphSpec, version: Version) -> Option<&'static str> {
    ERRATA.iter().find(|erratum| erratum.covers(version) && erratum.concerns(spec)).map(|erratum| erratum.what)
}

/// Every defect of `version`, in words.
pub(crate) fn of_version(version: Version) -> impl Iterator<Item = String> {
    ERRATA
        .iter()
        .filter(move |erratum| erratum.covers(version))
        .map(|erratum| format!("{} in versions {} to before {}", erratum.what, erratum.from, erratum.before))
}

#[cfg(test)]
mod tests {
    use super::{
        super::graph::{Element, Pattern, tests::same},
        *,
    };

    #[test]
    fn half_3d_is_refused_exactly_in_its_versions() {
        for element in [Element::F16, Element::Bf16] {
            let spec = same(element, Pattern::Bias, &[1, 16, 4, 8, 8], 16, &[3, 3, 3]);
            for (version, refused) in
                [(90_700, false), (90_799, false), (90_800, true), (91_002, true), (91_499, true), (91_500, false)]
            {
                assert_eq!(objection(&spec, Version(version)).is_some(), refused, "{element:?} {version}");
            }
        }
    }

    #[test]
    fn what_is_not_concerned_passes() {
        let bad = Version(91_002);
        let one_long_axis = same(Element::Bf16, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[3, 1, 1]);
        assert!(objection(&one_long_axis, bad).is_some());
        let pointwise = same(Element::Bf16, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[1, 1, 1]);
        let flat = same(Element::Bf16, Pattern::Plain, &[1, 16, 8, 8], 16, &[3, 3]);
        let single = same(Element::F32, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[3, 3, 3]);
        for spec in [pointwise, flat, single] {
            assert_eq!(objection(&spec, bad), None, "{spec:?}");
        }
    }

    #[test]
    fn the_defects_of_a_version_are_told() {
        assert_eq!(of_version(Version(91_900)).count(), 0);
        let told: Vec<String> = of_version(Version(91_002)).collect();
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("163539") && told[0].ends_with("9.8.0 to before 9.15.0"), "{told:?}");
    }
}
