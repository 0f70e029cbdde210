use std::sync::{Arc, Mutex};

use candle_core::{DType, Device};
use tracing::{
    Event, Metadata as Meta, Subscriber,
    field::{Field, Visit},
    span,
};

use super::*;
use crate::{
    safetensors::Safetensors,
    write::{Metadata, TensorData, to_bytes},
};

fn source(tensors: &[TensorData<'_>]) -> Arc<dyn TensorSource> {
    let bytes = to_bytes(tensors, &Metadata::new()).unwrap();
    Arc::new(Safetensors::from_bytes(Arc::new(bytes), "x.safetensors").unwrap())
}

fn model() -> Vec<TensorData<'static>> {
    vec![
        TensorData::bf16("blocks.0.q.weight", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        TensorData::f32("blocks.0.k.weight", &[1, 3], &[7.0, 8.0, 9.0]),
        TensorData::f32("norm.weight", &[3], &[1.0, 1.5, 2.0]),
        TensorData::new("steps", StoredDType::I64, &[], 9i64.to_le_bytes().to_vec()),
    ]
}

fn plan() -> Vec<Expected> {
    vec![
        Expected::new("blocks.0.q.weight", [2, 3]),
        Expected::new("blocks.0.k.weight", [1, 3]),
        Expected::new("norm.weight", [3]),
    ]
}

fn load(tensors: &[TensorData<'_>], plan: &[Expected], dtype: DType) -> Result<Loader> {
    Loader::new(source(tensors), plan, |name| name == "steps", dtype, &Device::Cpu)
}

/// The report of a plan that does not fit, and its text.
fn report(tensors: &[TensorData<'_>], plan: &[Expected]) -> (PlanReport, String) {
    let error = load(tensors, plan, DType::F32).map(|_| ()).unwrap_err();
    let text = error.to_string();
    match error {
        Error::Plan { report, file } => {
            assert_eq!(file, "x.safetensors");
            (*report, text)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_fitting_plan_is_handed_out_once() {
    let mut loader = load(&model(), &plan(), DType::F32).unwrap();
    assert_eq!(loader.tensor("norm.weight").unwrap().to_vec1::<f32>().unwrap(), [1.0, 1.5, 2.0]);
    let q = loader.linear("blocks.0.q.weight").unwrap();
    assert_eq!((q.out_features(), q.in_features(), q.dtype()), (2, 3, DType::BF16));
    let twice = loader.tensor("norm.weight").unwrap_err();
    assert!(matches!(twice, Error::NotPlanned { problem: "twice", .. }));
    let outside = loader.tensor("steps").unwrap_err();
    assert!(matches!(outside, Error::NotPlanned { problem: "outside the plan", .. }));
    let error = loader.finish().unwrap_err().to_string();
    assert!(error.contains("1 tensor") && error.contains("blocks.0.k.weight"), "{error}");
}

#[test]
fn a_loader_that_gave_everything_finishes() {
    let mut loader = load(&model(), &plan(), DType::BF16).unwrap();
    for e in plan() {
        assert_eq!(loader.tensor(&e.name).unwrap().dtype(), DType::BF16);
    }
    loader.finish().unwrap();
}

/// A matrix on the CPU is multiplied where it lies: the result is that of the stored values, in their stored type.
#[test]
fn linear_maps_read_the_stored_values() {
    let mut loader = load(&model(), &plan(), DType::F32).unwrap();
    let x = candle_core::Tensor::new(&[[1.0f32, 10.0, 100.0]], &Device::Cpu).unwrap();
    let q = loader.linear("blocks.0.q.weight").unwrap();
    let y = candle_fork::linear(&x, &q, None).unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), [[321.0, 654.0]]);
}

#[test]
fn stacked_matrices_are_one_map() {
    let mut tensors = model();
    tensors[1] = TensorData::bf16("blocks.0.k.weight", &[1, 3], &[7.0, 8.0, 9.0]);
    let mut loader = load(&tensors, &plan(), DType::F32).unwrap();
    let w = loader.linear_stack(&["blocks.0.k.weight", "blocks.0.q.weight"]).unwrap();
    assert_eq!((w.out_features(), w.in_features()), (3, 3));
    let x = candle_core::Tensor::new(&[[1.0f32, 10.0, 100.0]], &Device::Cpu).unwrap();
    let y = candle_fork::linear(&x, &w, None).unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), [[987.0, 321.0, 654.0]]);
    let names = loader.finish().unwrap_err().to_string();
    assert!(names.contains("norm.weight") && !names.contains("blocks"), "{names}");
}

#[test]
fn stacks_need_equal_columns() {
    let tensors = [TensorData::f32("a", &[1, 2], &[1.0; 2]), TensorData::f32("b", &[1, 3], &[1.0; 3])];
    let plan = [Expected::new("a", [1, 2]), Expected::new("b", [1, 3])];
    let mut loader = load(&tensors, &plan, DType::F32).unwrap();
    let error = loader.linear_stack(&["a", "b"]).unwrap_err();
    assert!(matches!(&error, Error::Tensor { tensor, .. } if tensor == "a, b"), "{error}");
}

#[test]
fn a_linear_map_is_a_matrix() {
    let mut loader = load(&model(), &plan(), DType::F32).unwrap();
    let error = loader.linear("norm.weight").unwrap_err();
    assert!(matches!(error, Error::NotAMatrix { ref shape, .. } if shape == &[3]), "{error}");
}

/// All differences in one message: first ten names of each kind, counts, shapes.
#[test]
fn all_differences_are_in_one_message() {
    let mut tensors: Vec<_> = (0..12).map(|i| TensorData::f32(format!("extra.{i:02}"), &[1], &[1.0])).collect();
    tensors.push(TensorData::f32("w", &[2, 3], &[1.0; 6]));
    tensors.push(TensorData::new("q", StoredDType::I8, &[2], vec![1, 2]));
    let mut plan: Vec<_> = (0..11).map(|i| Expected::new(format!("lost.{i:02}"), [1])).collect();
    plan.push(Expected::new("w", [3, 2]));
    plan.push(Expected::new("q", [2]));
    let (report, text) = report(&tensors, &plan);
    assert_eq!((report.missing.len(), report.misshapen.len(), report.unexpected.len()), (11, 1, 12));
    assert_eq!(report.unusable, [Unusable { name: "q".to_owned(), dtype: StoredDType::I8, quantisation: None }]);
    assert!(text.contains("11 tensors missing (lost.00, ") && text.contains("lost.09 and 1 more)"), "{text}");
    assert!(!text.contains("lost.10"), "{text}");
    assert!(text.contains("1 tensor of another shape (w is [2, 3], needs [3, 2])"), "{text}");
    assert!(text.contains("12 tensors unexpected (extra.00, ") && text.contains("extra.09 and 2 more)"), "{text}");
    assert!(text.contains("q is I8"), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

/// The small input layers are gone: they are named before anything is loaded.
#[test]
fn missing_names_are_listed() {
    let (report, text) = report(&model()[..2], &plan());
    assert_eq!(report.missing, ["norm.weight"]);
    assert_eq!(report.hint, None);
    assert!(text.contains("x.safetensors does not fit: 1 tensor missing (norm.weight)"), "{text}");
}

#[test]
fn a_known_prefix_is_hinted_at() {
    for prefix in KNOWN_PREFIXES {
        let mut tensors = model();
        for t in &mut tensors {
            t.name = format!("{prefix}{}", t.name);
        }
        let (report, text) = report(&tensors, &plan());
        assert!(report.hint.is_some_and(|h| h.contains(&format!("under the prefix `{prefix}`"))), "{text}");
        // And the other way round.
        let prefixed: Vec<_> =
            plan().iter().map(|e| Expected::new(format!("{prefix}{}", e.name), e.shape.clone())).collect();
        let (_, text) = self::report(&model(), &prefixed);
        assert!(text.contains(&format!("without the prefix `{prefix}`")), "{text}");
    }
    // A prefix that leaves something out is no hint.
    let mut tensors = model();
    for t in &mut tensors[..2] {
        t.name = format!("vae.{}", t.name);
    }
    assert_eq!(report(&tensors, &plan()).0.hint, None);
}

#[test]
fn another_model_is_named() {
    let tensors = [
        TensorData::bf16("bn.running_mean", &[1], &[0.0]),
        TensorData::bf16("decoder.mid_block.resnets.0.norm1.weight", &[1], &[0.0]),
    ];
    let (_, text) = report(&tensors, &plan());
    assert!(text.contains("looks like FLUX.2 VAE"), "{text}");
}

#[test]
fn a_plan_names_each_tensor_once() {
    let mut twice = plan();
    twice.push(Expected::new("norm.weight", [3]));
    assert_eq!(report(&model(), &twice).0.repeated, ["norm.weight"]);
}

/// Integers become floats only by accident; 8-bit floats need the scales that come with them.
#[test]
fn types_that_need_more_than_a_conversion_are_refused() {
    for &stored in StoredDType::ALL {
        let tensors = [TensorData::new("w", stored, &[4, 2], vec![0x11; stored.byte_len(&[4, 2]).unwrap()])];
        let float = matches!(stored, StoredDType::F64 | StoredDType::F32 | StoredDType::F16 | StoredDType::BF16);
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let loaded = load(&tensors, &[Expected::new("w", [4, 2])], dtype);
            assert_eq!(loaded.is_ok(), float, "{stored} as {dtype:?}");
            if let Ok(mut loader) = loaded {
                assert_eq!(loader.tensor("w").unwrap().dtype(), dtype);
            }
        }
    }
    let tensors = [TensorData::new("w", StoredDType::I64, &[1], 5i64.to_le_bytes().to_vec())];
    let mut loader = load(&tensors, &[Expected::new("w", [1])], DType::I64).unwrap();
    assert_eq!(loader.tensor("w").unwrap().to_vec1::<i64>().unwrap(), [5]);
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let tensors = [
        TensorData::f32("norm.weight", &[3], &[1.0, f32::NAN, f32::NAN]),
        TensorData::bf16("m", &[2, 2], &[1.0, 2.0, 3.0, f32::INFINITY]),
    ];
    let plan = [Expected::new("norm.weight", [3]), Expected::new("m", [2, 2])];
    let mut loader = load(&tensors, &plan, DType::F32).unwrap();
    let text = loader.tensor("norm.weight").unwrap_err().to_string();
    assert_eq!(text, "tensor `norm.weight` of x.safetensors: element 1 is NaN");
    let text = loader.linear("m").unwrap_err().to_string();
    assert_eq!(text, "tensor `m` of x.safetensors: element 3 is inf");
    // Without the check both load.
    let options = LoaderOptions::default().with_values(ValueCheck::Off);
    let mut loader =
        Loader::with_options(source(&tensors), &plan, |_| false, DType::F32, &Device::Cpu, options).unwrap();
    loader.tensor("norm.weight").unwrap();
    loader.linear("m").unwrap();
}

#[test]
fn values_that_do_not_fit_the_target_are_refused() {
    let tensors = [TensorData::f32("w", &[2, 1], &[1.0, 1e6])];
    let plan = [Expected::new("w", [2, 1])];
    let text = load(&tensors, &plan, DType::F16).unwrap().tensor("w").unwrap_err().to_string();
    assert!(text.contains("element 1 is 1e6, too large for F16"), "{text}");
    load(&tensors, &plan, DType::BF16).unwrap().tensor("w").unwrap();
}

/// Keeps the text of all warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push(format!("{field}={value:?}"));
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, meta: &Meta<'_>) -> bool {
        *meta.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Weights that were read as zeros give a plausible but wrong picture: a warning names the matrix. A zero bias is usual.
#[test]
fn a_matrix_of_zeros_warns() {
    let tensors = [
        TensorData::bf16("zero.weight", &[2, 2], &[0.0; 4]),
        TensorData::bf16("zero.conv", &[2, 1, 1, 1], &[0.0; 2]),
        TensorData::bf16("almost.weight", &[2, 2], &[0.0, 0.0, 0.0, 1e-30]),
        TensorData::bf16("bias", &[2], &[0.0; 2]),
    ];
    let plan: Vec<_> = tensors.iter().map(|t| Expected::new(t.name.clone(), t.shape.clone())).collect();
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let mut loader = load(&tensors, &plan, DType::F32).unwrap();
        loader.linear("zero.weight").unwrap();
        loader.linear("almost.weight").unwrap();
        loader.tensor("zero.conv").unwrap();
        loader.tensor("bias").unwrap();
        loader.finish().unwrap();
    });
    let text = warnings.0.lock().unwrap().join("\n");
    assert!(text.contains("zero.weight") && text.contains("zero.conv"), "{text}");
    assert!(!text.contains("almost") && !text.contains("bias"), "{text}");
}

#[test]
fn name_tables_are_read() {
    let table = Expected::from_table("# two\na.weight\t2,3\n\nb\t\nc\t7\r\n").unwrap();
    assert_eq!(table, [Expected::new("a.weight", [2, 3]), Expected::new("b", []), Expected::new("c", [7])]);
    for (text, line) in [("a 1", 1), ("a\t1\nb\tx", 2), ("a\t1,,2", 1), ("a\t,", 1)] {
        assert!(matches!(Expected::from_table(text), Err(Error::NameTable { line: l, .. }) if l == line), "{text}");
    }
}
