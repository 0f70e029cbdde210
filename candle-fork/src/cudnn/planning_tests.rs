//! The library's own planner on a machine without a GPU: it is asked for plans for a device that is only described, above
//! a driver that does nothing.
//!
//! Needs `TALLOW_CUDNN` (a `libcudnn.so.9` or its directory, 9.8 or newer, with cuBLASLt beside it) and a C compiler; skips
//! with a message otherwise.

use std::{io::Write, path::Path, process::Command};

use super::{
    attention::{self, AttentionSpec, Form},
    convolution::{
        ConvolutionSpec, Pattern,
        tests::{channels_last, same},
    },
    descriptor::{Descriptor, Finalised},
    graph::{Element, Graph, TensorSpec},
    library::{Library, library},
    plan::{Choice, Plan, Site},
    rules::Rules,
    search,
    sys::{attribute, descriptor},
};
use crate::cudnn_policy::{FallbackReason, Policy};

/// An H200.
const DEVICE: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
"multiProcessorCount":132,"smCountOrigin":0,"warpSize":32,"maxSharedMemoryPerBlock":49152,
"maxSharedMemoryPerBlockOptin":232448,"oversizedSharedMemoryPerBlock":232448,"reservedSharedMemoryPerBlock":1024,
"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,
"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":150323855360,"smClockRateKHz":1980000,
"memClockRateKHz":3201000,"memoryBusWidth":6144,"l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,
"driverVer":13000,"deviceName":"NVIDIA H200"}"#;

/// The library above a driver that does nothing, and the described device.
fn planner() -> Option<(&'static Library, Finalised)> {
    let skip = |why: &str| {
        // Not `eprintln!`: the test harness captures that.
        let _ = writeln!(std::io::stderr(), "SKIPPED planning without a GPU: {why}");
        None
    };
    if std::env::var_os(search::OVERRIDE).is_none() {
        return skip("TALLOW_CUDNN is not set");
    }
    if let Err(why) = load_stub_driver() {
        return skip(&why);
    }
    let library = library().unwrap_or_else(|unavailable| panic!("{unavailable}\n{:#?}", unavailable.attempts));
    let described = Descriptor::new(library, descriptor::DEVICE_PROPERTIES)
        .and_then(|device| device.text(attribute::DEVICE_PROPERTIES_JSON, DEVICE))
        .and_then(Descriptor::finalise);
    Some((library, described.unwrap()))
}

/// Compiles the driver and loads it, so that cuDNN finds it by its name. One that is loaded already stays.
fn load_stub_driver() -> Result<(), String> {
    static LOADED: std::sync::OnceLock<Result<(), String>> = std::sync::OnceLock::new();
    LOADED
        .get_or_init(|| {
            let directory = tempfile::tempdir().map_err(|e| e.to_string())?;
            let library = directory.path().join("libcuda.so.1");
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cudnn/stub_driver.c");
            let compiled = Command::new("cc")
                .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"])
                .args([&library, &source])
                .arg("-ldl")
                .status();
            match compiled {
                Ok(status) if status.success() => {}
                other => return Err(format!("the driver was not compiled: {other:?}")),
            }
            super::library::load_for_good(&library)
        })
        .clone()
}

fn build(graph: impl Into<Graph>, policy: &Policy) -> Option<Result<Plan, super::refusal::Refusal>> {
    let (library, device) = planner()?;
    let graph = graph.into();
    let start = std::time::Instant::now();
    let plan = Plan::build(library, graph, Site::Described(&device), &Rules::of(policy, &graph), Choice::First);
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    match &plan {
        Ok(plan) => {
            println!("{milliseconds:.1} ms, {}, workspace {}: {}", plan.engine(), plan.workspace(), graph.key());
        }
        Err(refusal) => println!("{milliseconds:.1} ms, {refusal}: {}", graph.key()),
    }
    Some(plan)
}

/// The rules of the default policy for a graph.
fn rules(graph: impl Into<Graph>) -> Rules {
    Rules::of(&Policy::default(), &graph.into())
}

/// Convolutions of the Wan decoder, in the sizes of one steady latent frame at 832x480, and others that are hard.
fn half_cases(element: Element) -> Vec<ConvolutionSpec> {
    let mut cases = Vec::new();
    for pattern in [Pattern::Plain, Pattern::Bias, Pattern::ResidualBias] {
        for (x, k, taps) in [
            ([1, 384, 3, 60, 104], 384, [3, 3, 3]),
            ([1, 384, 4, 120, 208], 384, [3, 3, 3]),
            ([1, 192, 6, 240, 416], 192, [3, 3, 3]),
            ([1, 96, 6, 480, 832], 96, [3, 3, 3]),
            ([1, 384, 3, 60, 104], 768, [3, 1, 1]),
        ] {
            let mut spec = same(element, pattern, &x, k, &taps);
            // The frames before are in the input: no padding in time.
            spec.before[0] = 0;
            spec.after[0] = 0;
            let y: Vec<usize> = [1, k, x[2] + 1 - taps[0], x[3], x[4]].to_vec();
            spec.y = channels_last(&y);
            cases.push(spec);
        }
        // The middle block, 16 channels in, 3 channels out, two axes, one axis.
        cases.push(same(element, pattern, &[1, 16, 3, 60, 104], 384, &[3, 3, 3]));
        cases.push(same(element, pattern, &[1, 96, 3, 480, 832], 3, &[3, 3, 3]));
        cases.push(same(element, pattern, &[4, 384, 120, 208], 192, &[3, 3]));
        cases.push(same(element, pattern, &[1, 3, 480, 832], 96, &[3, 3]));
        cases.push(same(element, pattern, &[1, 64, 1, 4000], 64, &[1, 7]));
    }
    cases
}

#[test]
fn half_precision_has_ready_plans_for_every_pattern() {
    for element in [Element::Bf16, Element::F16] {
        for spec in half_cases(element) {
            let Some(plan) = build(&spec, &Policy::default()) else { return };
            let plan = plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
            assert!(plan.workspace() <= Policy::default().workspace_cap, "{spec:?}");
        }
    }
}

#[test]
fn single_precision_has_plans_without_tensor_cores() {
    for (x, k, taps) in [
        (&[1, 96, 6, 240, 416][..], 96, &[3, 3, 3][..]),
        (&[1, 384, 60, 104], 384, &[3, 3]),
        (&[1, 96, 480, 832], 3, &[3, 3]),
        (&[1, 64, 1, 4000], 64, &[1, 7]),
    ] {
        let spec = same(Element::F32, Pattern::Plain, x, k, taps);
        let Some(plan) = build(&spec, &Policy::default()) else { return };
        let plan = plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
        // Left to itself, the library takes TF32.
        let relaxed = build(&spec, &Policy { allow_tf32: true, ..Policy::default() }).unwrap().unwrap();
        assert_ne!(plan.engine(), relaxed.engine(), "{spec:?}");
    }
}

#[test]
fn other_geometries_have_plans() {
    let base = same(Element::Bf16, Pattern::Bias, &[1, 96, 64, 64], 96, &[3, 3]);
    // Padding behind only, stride 2.
    let down = ConvolutionSpec {
        before: [0; 3],
        after: [1, 1, 0],
        stride: [2, 2, 1],
        y: channels_last(&[1, 96, 32, 32]),
        ..base
    };
    let dilated = ConvolutionSpec { before: [2, 2, 0], after: [2, 2, 0], dilation: [2, 2, 1], ..base };
    let grouped = ConvolutionSpec { w: channels_last(&[96, 48, 3, 3]), ..base };
    // A part of a larger batch of frames: the distance of images is that of the whole.
    let slice = ConvolutionSpec {
        x: TensorSpec::new(&[2, 96, 3, 64, 64], &[96 * 64 * 64 * 9, 1, 96 * 64 * 64, 96 * 64, 96]).unwrap(),
        ..same(Element::Bf16, Pattern::Bias, &[2, 96, 3, 64, 64], 96, &[3, 3, 3])
    };
    // Frames only before, as in causal models.
    let volume = same(Element::Bf16, Pattern::Bias, &[1, 96, 4, 64, 64], 96, &[3, 3, 3]);
    let causal = ConvolutionSpec { before: [2, 1, 1], after: [0, 1, 1], ..volume };
    for spec in [down, dilated, grouped, slice, causal] {
        let Some(plan) = build(&spec, &Policy::default()) else { return };
        plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
    }
}

#[test]
fn the_cap_on_workspace_chooses_another_plan() {
    let spec = same(Element::Bf16, Pattern::Bias, &[1, 98, 64, 64], 98, &[3, 3]);
    let Some(free) = build(&spec, &Policy::default()) else { return };
    let free = free.unwrap();
    assert!(free.workspace() > 0, "channels that are not a multiple of 8 are padded in the workspace");
    let capped = build(&spec, &Policy { workspace_cap: free.workspace() - 1, ..Policy::default() }).unwrap().unwrap();
    assert!(capped.workspace() < free.workspace());
}

#[test]
fn a_graph_that_makes_no_sense_is_refused_in_the_words_of_the_library() {
    let spec = same(Element::Bf16, Pattern::Bias, &[1, 96, 4, 64, 64], 96, &[3, 3, 3]);
    let wrong = ConvolutionSpec { y: channels_last(&[1, 96, 4, 64, 63]), ..spec };
    let Some(plan) = build(&wrong, &Policy::default()) else { return };
    let refusal = plan.map(|plan| plan.engine().to_string()).unwrap_err();
    assert_eq!(refusal.reason, FallbackReason::Failed);
    assert!(refusal.text.contains("CUDNN_STATUS_BAD_PARAM"), "{refusal}");
}

#[test]
fn a_timed_choice_takes_the_fastest() {
    let Some((library, device)) = planner() else { return };
    let spec = same(Element::Bf16, Pattern::Bias, &[1, 96, 64, 64], 96, &[3, 3]);
    let mut seen = Vec::new();
    let mut timer = |plan: &Plan, _: f64| {
        seen.push(plan.engine().to_string());
        Ok([3.0, 1.0, 2.0][seen.len() - 1])
    };
    let choice = Choice::Timed { max_plans: 3, timer: &mut timer };
    let plan = Plan::build(library, &spec, Site::Described(&device), &rules(&spec), choice).unwrap();
    assert_eq!(seen.len(), 3);
    assert!(seen[0] != seen[1] && seen[1] != seen[2], "{seen:?}");
    assert_eq!(**plan.engine(), seen[1]);
}

#[test]
fn the_library_understands_the_graph_as_it_is_meant() {
    let Some((library, device)) = planner() else { return };
    for pattern in [Pattern::Plain, Pattern::Bias, Pattern::ResidualBias] {
        let volume = same(Element::Bf16, pattern, &[1, 96, 9, 64, 64], 32, &[3, 3, 3]);
        let spec = ConvolutionSpec {
            before: [4, 1, 2],
            after: [0, 1, 0],
            stride: [1, 1, 2],
            dilation: [2, 1, 1],
            y: channels_last(&[1, 32, 9, 64, 32]),
            ..volume
        };
        let plan = Plan::build(library, &spec, Site::Described(&device), &rules(&spec), Choice::First).unwrap();
        let json: serde_json::Value = serde_json::from_str(&plan.to_json().unwrap()).unwrap();
        let graph = &json["operationGraph"];
        // What is not virtual is what an execution has to be given.
        let tensors = graph["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["isVirtual"] == false);
        let names: Vec<i64> = tensors.map(|t| t["name"].as_str().unwrap().parse().unwrap()).collect();
        let mut operands = spec.operands().to_vec();
        operands.sort_unstable();
        assert_eq!(names, operands, "{pattern:?}");
        let convolution = &graph["nodes"][0];
        assert_eq!(convolution["pad_lower"], serde_json::json!([4, 1, 2]));
        assert_eq!(convolution["pad_upper"], serde_json::json!([0, 1, 0]));
        assert_eq!(convolution["stride"], serde_json::json!([1, 1, 2]));
        assert_eq!(convolution["dilation"], serde_json::json!([2, 1, 1]));
        assert_eq!((convolution["X"].as_str(), convolution["W"].as_str()), (Some("1"), Some("2")));
        let last = graph["nodes"].as_array().unwrap().last().unwrap();
        assert_eq!(last["Y"], "3");
    }
}

#[test]
fn plans_survive_as_text() {
    let Some((library, device)) = planner() else { return };
    let spec = same(Element::Bf16, Pattern::ResidualBias, &[1, 96, 4, 64, 64], 96, &[3, 3, 3]);
    let site = Site::Described(&device);
    let plan = Plan::build(library, &spec, site, &rules(&spec), Choice::First).unwrap();
    let json = plan.to_json().unwrap();
    let again = Plan::load(library, &spec, site, &json).unwrap();
    assert_eq!((again.workspace(), again.engine()), (plan.workspace(), plan.engine()));
    // Of another device, damaged: refused, not crashed.
    let other = json.replace("\"multiProcessorCount\":132", "\"multiProcessorCount\":114");
    assert_ne!(json, other);
    for damaged in [other.as_str(), "{}", "", &json[..json.len() / 2]] {
        assert!(Plan::load(library, &spec, site, damaged).is_err());
    }
    // Of another version: refused as a broken installation would be, but it is none.
    let version = format!("\"cudnnVersion\":{}", library.version().0);
    assert!(json.contains(&version), "{json}");
    let failure = Plan::load(library, &spec, site, &json.replace(&version, "\"cudnnVersion\":91700")).unwrap_err();
    assert!(failure.is_installation(), "{failure}");
    assert_eq!(library.broken(), None);
}

/// Batch, queries, keys, heads, key heads, width.
const ATTENTIONS: [[usize; 6]; 11] = [
    // An image model's step, at 1024 x 1024 and with a picture to refer to; a text encoder.
    [1, 4608, 4608, 24, 24, 128],
    [1, 8704, 8704, 32, 32, 128],
    [1, 512, 512, 32, 8, 128],
    // Odd lengths, cross-attention, one query, other widths.
    [2, 257, 1029, 4, 2, 64],
    [1, 1, 77, 8, 8, 64],
    [1, 333, 1, 2, 1, 80],
    [1, 100, 100, 3, 3, 72],
    [3, 64, 64, 2, 2, 8],
    [1, 1024, 1024, 2, 1, 256],
    // The middle of a picture's decoder.
    [1, 16_384, 16_384, 1, 1, 512],
    [1, 31, 32_761, 2, 2, 128],
];

#[test]
fn attention_has_plans_in_the_form_of_the_version() {
    let Some((library, _)) = planner() else { return };
    for extents in ATTENTIONS {
        let element = if extents[3] == 24 { Element::F16 } else { Element::Bf16 };
        let spec = attention::tests::spec(element, extents, Form::of(library.version()));
        assert_eq!(spec.unsupported(library.version(), 900), None, "{spec:?}");
        let Some(plan) = build(&spec, &Policy::default()) else { return };
        let plan = plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
        assert!(plan.workspace() <= 64 << 20, "{spec:?}");
    }
}

/// The composite serves the versions before the unified operation; later ones still take it, so it can be tried here.
#[test]
fn attention_has_plans_as_a_composite() {
    for extents in [ATTENTIONS[0], ATTENTIONS[2], ATTENTIONS[3], ATTENTIONS[6]] {
        let spec = attention::tests::spec(Element::Bf16, extents, Form::Composite);
        let Some(plan) = build(&spec, &Policy::default()) else { return };
        plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
    }
}

#[test]
fn attention_that_has_no_kernel_is_refused_by_the_library_too() {
    let Some((library, _)) = planner() else { return };
    for (element, width) in [(Element::Bf16, 60), (Element::F32, 64)] {
        let spec = attention::tests::spec(element, [1, 64, 64, 2, 2, width], Form::of(library.version()));
        let refusal = build(&spec, &Policy::default()).unwrap().map(|plan| plan.engine().to_string()).unwrap_err();
        assert_ne!(refusal.reason, FallbackReason::Unavailable, "{refusal}");
        assert!(spec.unsupported(library.version(), 900).is_some());
    }
}

#[test]
fn attention_is_understood_as_it_is_meant() {
    let Some((library, device)) = planner() else { return };
    for form in [Form::of(library.version()), Form::Composite] {
        let spec = attention::tests::spec(Element::Bf16, [2, 100, 130, 4, 2, 64], form);
        let plan = Plan::build(library, &spec, Site::Described(&device), &rules(&spec), Choice::First).unwrap();
        let text = plan.to_json().unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let tensors = json["operationGraph"]["tensors"].as_array().unwrap();
        // What is not virtual is what an execution has to be given.
        let real = tensors.iter().filter(|tensor| tensor["isVirtual"] == false);
        let names: Vec<i64> = real.map(|t| t["name"].as_str().unwrap().parse().unwrap()).collect();
        assert_eq!(names, spec.operands(), "{form:?}");
        let again = Plan::load(library, &spec, Site::Described(&device), &text).unwrap();
        assert_eq!((again.workspace(), again.engine()), (plan.workspace(), plan.engine()));
    }
}

/// A plan for one layout is not one for another: what is cut from a projection needs no copy.
#[test]
fn attention_reads_and_writes_rows_of_any_pitch() {
    let base = attention::tests::spec(Element::Bf16, ATTENTIONS[0], Form::Unified);
    let into = AttentionSpec { o: attention::tests::rows(1, 4608, 24, 128, 12_288), ..base };
    let packed = attention::tests::rows(1, 4608, 24, 128, 3072);
    for spec in [into, AttentionSpec { q: packed, k: packed, ..base }] {
        let Some(plan) = build(&spec, &Policy::default()) else { return };
        plan.unwrap_or_else(|refusal| panic!("{spec:?}: {refusal}"));
    }
}
