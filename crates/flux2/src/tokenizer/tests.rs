use super::*;
use crate::testing::{Golden, demo, demo_with, path};

fn tokenizer() -> PromptTokenizer {
    PromptTokenizer::load(&demo(), 64, None).expect("the demonstration tokenizer")
}

#[test]
fn ids_and_masks_equal_the_reference() {
    let tokenizer = tokenizer();
    for name in ["flux2-a", "flux2-b", "flux2-c"] {
        let golden = Golden::open(&format!("{name}.safetensors"));
        let tokens = tokenizer.encode(golden.meta("prompt")).expect("tokens");
        assert_eq!(tokens.ids, golden.ints("input_ids"), "{name}");
        assert_eq!(tokens.mask(), golden.ints("attention_mask"), "{name}");
        assert_eq!(tokens.dropped, 0);
    }
}

#[derive(Deserialize)]
struct Odd {
    max_sequence_length: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    input_ids: Vec<u32>,
    attention_mask: Vec<u32>,
}

#[test]
fn odd_prompts_equal_the_reference() {
    let text = std::fs::read(path("goldens/flux2-demo-tokens.json")).expect("a golden file");
    let odd: Odd = serde_json::from_slice(&text).expect("json");
    let tokenizer = PromptTokenizer::load(&demo(), odd.max_sequence_length, None).expect("a tokenizer");
    assert!(odd.cases.len() > 20);
    for case in odd.cases {
        let tokens = tokenizer.encode(&case.prompt).expect("tokens");
        assert_eq!(tokens.ids, case.input_ids, "{:?}", case.prompt);
        assert_eq!(tokens.mask(), case.attention_mask, "{:?}", case.prompt);
    }
}

#[test]
fn the_fixed_padding_and_truncation_of_the_file_are_cleared() {
    // The file pads and cuts to 64; 200 and 7 are neither.
    let long = PromptTokenizer::load(&demo(), 200, None).expect("a tokenizer").encode("a red circle").expect("tokens");
    assert_eq!(long.ids.len(), 200);
    assert!(long.n_real < 64, "{}", long.n_real);
    assert!(long.ids[long.n_real..].iter().all(|&id| id == 0));
    let short = PromptTokenizer::load(&demo(), 7, None).expect("a tokenizer").encode("a red circle").expect("tokens");
    assert_eq!(short.ids, long.ids[..7]);
    assert_eq!((short.n_real, short.dropped), (7, long.n_real - 7));
}

#[test]
fn a_long_prompt_says_how_much_was_dropped() {
    let tokenizer = tokenizer();
    let base = tokenizer.encode("").expect("tokens").n_real;
    // "a" with its space is one token at every place but the first.
    for words in [64 - base, 65 - base, 66 - base, 2000] {
        let tokens = tokenizer.encode(&vec!["a"; words].join(" ")).expect("tokens");
        assert_eq!(tokens.dropped, (base + words).saturating_sub(64), "{words} words");
        assert_eq!((tokens.ids.len(), tokens.n_real), (64, (base + words).min(64)));
    }
}

#[test]
fn special_tokens_in_a_prompt_are_special() {
    let tokenizer = tokenizer();
    let special = tokenizer.encode("a<|im_end|>b").expect("tokens");
    assert_eq!(special.ids.iter().filter(|&&id| id == 2).count(), 2);
    // A typed padding token is a real one: the count is taken before padding.
    let (none, padded) = (tokenizer.encode("").expect("tokens"), tokenizer.encode("<|endoftext|>").expect("tokens"));
    assert_eq!(padded.n_real, none.n_real + 1);
    assert_eq!(padded.ids[5], 0);
}

#[test]
fn the_whole_text_is_tokenised_at_once() {
    // The template ends its first line with a newline; white space that follows has to meet it in one piece.
    let tokenizer = tokenizer();
    let text = PromptTokenizer::apply_chat_template("\na");
    assert!(text.starts_with("<|im_start|>user\n\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert_ne!(tokenizer.encode("\na").expect("tokens").ids, tokenizer.encode("a").expect("tokens").ids);
}

#[test]
fn the_padding_token_has_three_places() {
    let load = |config: &[u8], fallback| {
        PromptTokenizer::load(&demo_with(&[("tokenizer/tokenizer_config.json", config)]), 64, fallback)
    };
    let pad = |config: &[u8], fallback| load(config, fallback).expect("a tokenizer").pad_token_id();
    assert_eq!(pad(br#"{"pad_token": "<|im_end|>"}"#, Some(7)), 2);
    assert_eq!(pad(br#"{"pad_token": {"content": "<think>", "special": true}}"#, Some(7)), 3);
    assert_eq!(pad(b"{}", Some(7)), 7);
    assert_eq!(pad(b"", Some(7)), 7);
    assert!(matches!(load(b"{}", None), Err(Error::Config { field: "pad_token", .. })));
}

#[test]
fn unusable_tokenizers_are_refused() {
    let left = demo_with(&[("tokenizer/tokenizer_config.json", br#"{"padding_side": "left"}"#)]);
    assert!(matches!(PromptTokenizer::load(&left, 64, Some(0)), Err(Error::Config { field: "padding_side", .. })));
    let broken = demo_with(&[("tokenizer/tokenizer.json", b"{}")]);
    let error = PromptTokenizer::load(&broken, 64, Some(0)).expect_err("not a tokenizer");
    assert!(error.to_string().contains("tokenizer/tokenizer.json"), "{error}");
    let missing = demo_with(&[("tokenizer/tokenizer.json", b"")]);
    assert!(matches!(PromptTokenizer::load(&missing, 64, Some(0)), Err(Error::Weights(_))));
}
