//! Attention with a feed-forward branch beside it.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{
    AttentionInto, AttentionMask, attention, attention_and_swiglu_into, cuda::beside::count, cudnn_policy::Attention,
    heads_of, swiglu,
};
use tests::gpu::{Failures, cuda, noise, seed};

use crate::{bits, under};

/// How often each is repeated: the two meet in another way each time.
const RUNS: usize = 5;

/// The bits of both alone, and proof that they ran side by side.
#[test]
fn branches_side_by_side() -> Result<()> {
    let suite = "gpu_attention beside a feed-forward branch";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (dtype, [batch, tokens, heads, width, mlp]) in [
        (DType::BF16, [1, 1536, 8, 128, 9216]),
        (DType::BF16, [2, 300, 4, 128, 1000]),
        (DType::F16, [1, 257, 3, 64, 96]),
        (DType::F32, [1, 130, 2, 72, 130]),
    ] {
        let at = || format!("{dtype:?} {batch} x {tokens}, {heads} heads of {width}, {mlp}");
        let h = heads * width;
        let projected = noise(seed, 1.0, &[batch, tokens, 3 * h + 2 * mlp], dtype)?.to_device(&device)?;
        let [q, k, v] = [0, h, 2 * h].map(|start| heads_of(&projected, start, heads, width));
        let (q, k, v) = (q?, k?, v?);
        let x = projected.narrow(2, 3 * h, 2 * mlp)?;
        let alone = under(Attention::Math, || {
            let attended = attention(&q, &k, &v, 0.1, AttentionMask::Full)?.flatten(2, 3)?;
            Ok(Tensor::cat(&[attended, swiglu(&x)?], 2)?)
        });
        let Some(alone) = failures.take(alone.result, at) else { continue };
        let alone = bits(&alone)?;
        let columns = h + mlp.next_multiple_of(width);
        for run in 0..RUNS {
            let joined = Tensor::full(f32::NAN, (batch, tokens, columns), &device)?.to_dtype(dtype)?;
            let out = heads_of(&joined, 0, heads, width)?;
            let call = AttentionInto { q: &q, k: &k, v: &v, softmax_scale: 0.1, mask: AttentionMask::Full, out: &out };
            let before = count();
            let both = || Ok(attention_and_swiglu_into(&call, &x, &joined.narrow(2, h, mlp)?)?);
            if failures.take(under(Attention::Math, both).result, at).is_none() {
                continue;
            }
            failures.check(count() == before + 1, || format!("{}: one behind the other", at()));
            let same = bits(&joined.narrow(2, 0, h + mlp)?)? == alone;
            failures.check(same, || format!("{}: run {run} gives other bits than each alone", at()));
        }
    }
    failures.finish(suite)
}
