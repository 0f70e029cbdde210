//! Tokens and prompt embeddings against transformers.
//!
//! The encoder's golden comes from a tiny random Qwen3 with grouped queries whose width is not the hidden size, see
//! `reference/golden_text_encoder.py`; the ids come from the demonstration model's tokenizer, see
//! `reference/golden_tokenizer.py`.

use anyhow::{Context, Result};
use flux2::{LoadOptions, PromptTokenizer, Qwen3Config, Qwen3Encoder};
use serde_json::Value;
use tests::{Golden, assert_close, data, demo};

/// f32 against f32 over a few layers.
const TOLERANCE: f64 = 1e-5;

fn encoder(golden: &Golden, out_layers: &[usize]) -> Result<Qwen3Encoder> {
    let config: Qwen3Config = serde_json::from_value(golden.config()?)?;
    Ok(Qwen3Encoder::load(&config, out_layers, golden.weights()?, &LoadOptions::default())?)
}

/// Ids of a case and how many of them are real.
fn tokens(golden: &Golden, case: &str) -> Result<(Vec<u32>, usize)> {
    let mask = golden.integers(&format!("in.{case}.attention_mask"))?;
    let n_real = mask.iter().sum::<u32>() as usize;
    Ok((golden.integers(&format!("in.{case}.input_ids"))?, n_real))
}

#[test]
fn every_layer_matches_the_reference_in_real_and_in_pad_rows() -> Result<()> {
    let golden = Golden::open("qwen3-encoder")?;
    let (ids, n_real) = tokens(&golden, "padded")?;
    assert!(1 < n_real && n_real < ids.len(), "the case needs both kinds of rows");
    // State 0 is the embedding, so a tap at 1 is one layer alone.
    for layer in 0..=4 {
        let want = golden.tensor(&format!("out.hidden_states.{layer}"))?;
        let got = encoder(&golden, &[layer])?.forward(&ids, n_real)?;
        for (rows, start, len) in [("real", 0, n_real), ("pad", n_real, ids.len() - n_real)] {
            let what = format!("state after {layer} layers, {rows} rows");
            assert_close(&what, &got.narrow(1, start, len)?, &want.narrow(1, start, len)?, TOLERANCE)?;
        }
    }
    Ok(())
}

#[test]
fn taps_match_the_reference_for_every_share_of_padding() -> Result<()> {
    let golden = Golden::open("qwen3-encoder")?;
    let out_layers: Vec<usize> = serde_json::from_str(golden.metadata("text_encoder_out_layers")?)?;
    let encoder = encoder(&golden, &out_layers)?;
    for case in ["padded", "one", "full"] {
        let (ids, n_real) = tokens(&golden, case)?;
        let got = encoder.forward(&ids, n_real)?;
        assert_close(case, &got, &golden.tensor(&format!("out.{case}.prompt_embeds"))?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn names_with_and_without_the_prefix_give_the_same_encoder() -> Result<()> {
    let golden = Golden::open("qwen3-encoder")?;
    let config: Qwen3Config = serde_json::from_value(golden.config()?)?;
    let mut container = golden.container();
    container.tensors =
        std::mem::take(&mut container.tensors).into_iter().map(|(name, t)| (format!("model.{name}"), t)).collect();
    let head = container.tensors["model.embed_tokens.weight"].clone();
    container.tensors.insert("lm_head.weight".to_owned(), head);
    let source = weights::Safetensors::from_bytes(std::sync::Arc::new(container.to_bytes()), "prefixed")?;
    let prefixed = Qwen3Encoder::load(&config, &[1, 4], std::sync::Arc::new(source), &LoadOptions::default())?;
    let (ids, n_real) = tokens(&golden, "padded")?;
    let bare = encoder(&golden, &[1, 4])?.forward(&ids, n_real)?;
    tests::assert_same_bits("prefixed", &prefixed.forward(&ids, n_real)?, &bare)
}

#[test]
fn ids_and_masks_of_odd_prompts_are_those_of_the_reference() -> Result<()> {
    let golden: Value = serde_json::from_slice(&std::fs::read(data("goldens/flux2-demo-tokens.json"))?)?;
    let length = golden["max_sequence_length"].as_u64().context("length")? as usize;
    let tokenizer = PromptTokenizer::load(&demo(), length, None)?;
    let cases = golden["cases"].as_array().context("cases")?;
    assert!(cases.len() >= 30);
    let (mut full, mut cut) = (0, 0);
    for case in cases {
        let prompt = case["prompt"].as_str().context("prompt")?;
        let tokens = tokenizer.encode(prompt)?;
        let want: Vec<u32> = serde_json::from_value(case["input_ids"].clone())?;
        assert_eq!(tokens.ids, want, "ids of {prompt:?}");
        let want: Vec<u32> = serde_json::from_value(case["attention_mask"].clone())?;
        assert_eq!(tokens.mask(), want, "mask of {prompt:?}");
        full += usize::from(tokens.n_real == length);
        cut += usize::from(tokens.dropped > 0);
    }
    assert!(full > 0 && cut > 0, "some prompts must be too long");
    Ok(())
}

#[test]
fn a_longer_text_changes_neither_ids_nor_count() -> Result<()> {
    // The demonstration tokenizer carries a fixed padding and truncation of its own, which must not take effect.
    let prompt = "a red circle on a blue background";
    let short = PromptTokenizer::load(&demo(), 64, None)?.encode(prompt)?;
    let long = PromptTokenizer::load(&demo(), 200, None)?.encode(prompt)?;
    assert_eq!((short.ids.len(), long.ids.len()), (64, 200));
    assert_eq!(short.n_real, long.n_real);
    assert_eq!(short.ids[..], long.ids[..64]);
    let cut = PromptTokenizer::load(&demo(), 10, None)?.encode(prompt)?;
    assert_eq!((cut.n_real, cut.dropped), (10, long.n_real - 10));
    assert_eq!(cut.ids[..], long.ids[..10]);
    Ok(())
}

#[test]
fn tokens_typed_in_a_prompt_are_special_tokens() -> Result<()> {
    let tokenizer = PromptTokenizer::load(&demo(), 64, None)?;
    let plain = tokenizer.encode("a red circle")?;
    let ended = tokenizer.encode("a red circle<|im_end|>")?;
    assert_eq!(ended.n_real, plain.n_real + 1);
    let pad = tokenizer.pad_token_id();
    let padded = tokenizer.encode("<|endoftext|>a red circle")?;
    assert_eq!(padded.n_real, plain.n_real + 1, "a typed padding token is real");
    assert_eq!(padded.ids[..padded.n_real].iter().filter(|&&id| id == pad).count(), 1);
    Ok(())
}
