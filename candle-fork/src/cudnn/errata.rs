//! Problems that some versions of cuDNN are known to compute wrongly.

use super::{graph::Graph, library::Version};

/// One known defect.
struct Erratum {
    /// First version that has it.
    from: Version,
    /// First version that has it no more, if there is one.
    before: Option<Version>,
    /// Whether a problem meets it, given the device's compute capability.
    concerns: fn(&Graph, u32) -> bool,
    /// What goes wrong, and where it was reported.
    what: &'static str,
}

const ERRATA: &[Erratum] = &[
    Erratum {
        from: Version(90_800),
        before: Some(Version(91_500)),
        concerns: |graph, _| {
            let Graph::Convolution(spec) = graph else { return false };
            spec.element.is_half() && spec.spatial() == 3 && spec.taps().iter().any(|&taps| taps > 1)
        },
        what: "half precision 3-d convolutions may be wrong (pytorch/pytorch#163539)",
    },
    Erratum {
        from: Version(91_000),
        before: Some(Version(91_002)),
        concerns: |graph, _| matches!(graph, Graph::Attention(_)),
        what: "attention may be wrong (refused by NVIDIA/cudnn-frontend)",
    },
    Erratum {
        from: Version(90_800),
        before: Some(Version(90_900)),
        concerns: |graph, capability| {
            matches!(graph, Graph::Attention(spec) if spec.width() > 128)
                && matches!(capability, 800..=899 | 1000..=1099)
        },
        what: "attention with heads above 128 components is limited to compute capability 9.0",
    },
    Erratum {
        from: Version(91_900),
        before: Some(Version(92_100)),
        concerns: |graph, capability| {
            let Graph::Attention(spec) = graph else { return false };
            let (heads, kv_heads) = spec.heads();
            heads != kv_heads && kv_heads < 8 && matches!(capability, 1000..=1099)
        },
        what: "attention with fewer than 8 shared key heads may be wrong on compute capability 10 \
               (pytorch/pytorch#193893)",
    },
    // Plans are offered and built; nobody promises that they are right.
    Erratum {
        from: Version(90_800),
        before: None,
        concerns: |graph, _| matches!(graph, Graph::Attention(spec) if spec.width() > 256),
        what: "attention with heads above 256 components is not documented",
    },
];

impl Erratum {
    fn covers(&self, version: Version) -> bool {
        self.from <= version && self.before.is_none_or(|before| version < before)
    }
}

/// The defect that speaks against `graph` in `version` on a device of `capability`, if there is one.
pub(super) fn objection(graph: &Graph, version: Version, capability: u32) -> Option<&'static str> {
    let concerned = ERRATA.iter().find(|erratum| erratum.covers(version) && (erratum.concerns)(graph, capability));
    concerned.map(|erratum| erratum.what)
}

/// Every defect of `version`, in words.
pub(crate) fn of_version(version: Version) -> impl Iterator<Item = String> {
    ERRATA.iter().filter(move |erratum| erratum.covers(version)).map(|erratum| match erratum.before {
        Some(before) => format!("{} in versions {} to before {before}", erratum.what, erratum.from),
        None => format!("{} from version {} on", erratum.what, erratum.from),
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            attention::{self, Form},
            convolution::{Pattern, tests::same},
            graph::Element,
        },
        *,
    };

    const HOPPER: u32 = 900;

    #[test]
    fn half_3d_is_refused_exactly_in_its_versions() {
        for element in [Element::F16, Element::Bf16] {
            let spec = same(element, Pattern::Bias, &[1, 16, 4, 8, 8], 16, &[3, 3, 3]);
            for (version, refused) in
                [(90_700, false), (90_799, false), (90_800, true), (91_002, true), (91_499, true), (91_500, false)]
            {
                assert_eq!(
                    objection(&(&spec).into(), Version(version), HOPPER).is_some(),
                    refused,
                    "{element:?} {version}"
                );
            }
        }
    }

    #[test]
    fn what_is_not_concerned_passes() {
        let bad = Version(91_002);
        let one_long_axis = same(Element::Bf16, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[3, 1, 1]);
        assert!(objection(&(&one_long_axis).into(), bad, HOPPER).is_some());
        let pointwise = same(Element::Bf16, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[1, 1, 1]);
        let flat = same(Element::Bf16, Pattern::Plain, &[1, 16, 8, 8], 16, &[3, 3]);
        let single = same(Element::F32, Pattern::Plain, &[1, 16, 4, 8, 8], 16, &[3, 3, 3]);
        for spec in [pointwise, flat, single] {
            assert_eq!(objection(&(&spec).into(), bad, HOPPER), None, "{spec:?}");
        }
    }

    #[test]
    fn the_defects_of_a_version_are_told() {
        let only: Vec<String> = of_version(Version(91_800)).collect();
        assert_eq!(only, ["attention with heads above 256 components is not documented from version 9.8.0 on"]);
        let told: Vec<String> = of_version(Version(91_002)).collect();
        assert_eq!(told.len(), 2);
        assert!(told[0].contains("163539") && told[0].ends_with("9.8.0 to before 9.15.0"), "{told:?}");
    }

    #[test]
    fn attention_is_refused_where_it_is_wrong() {
        let attention = |heads, kv_heads, width| {
            Graph::from(&attention::tests::spec(Element::Bf16, [1, 64, 64, heads, kv_heads, width], Form::Unified))
        };
        let (plain, wide, shared) = (attention(8, 8, 128), attention(8, 8, 256), attention(8, 4, 64));
        let cases = [
            (&plain, 90_899, 800, false),
            (&plain, 91_000, HOPPER, true),
            (&plain, 91_001, 1200, true),
            (&plain, 91_002, HOPPER, false),
            (&wide, 90_899, 890, true),
            (&wide, 90_899, 1000, true),
            (&wide, 90_899, HOPPER, false),
            (&wide, 90_900, 800, false),
            (&shared, 91_900, 1000, true),
            (&shared, 92_099, 1030, true),
            (&shared, 91_900, HOPPER, false),
            (&shared, 92_100, 1000, false),
            (&plain, 91_900, 1000, false),
            (&attention(1, 1, 256), 91_900, HOPPER, false),
            (&attention(1, 1, 264), 91_900, HOPPER, true),
            (&attention(32, 8, 128), 91_900, 1000, false),
        ];
        for (graph, version, capability, refused) in cases {
            let objection = objection(graph, Version(version), capability);
            assert_eq!(objection.is_some(), refused, "{version} {capability} {graph:?}");
        }
    }
}
