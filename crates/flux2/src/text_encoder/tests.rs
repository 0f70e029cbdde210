use std::{collections::BTreeMap, ops::ControlFlow};

use serde_json::{Value, json};
use weights::{Safetensors, write::TensorData};

use super::*;
use crate::{
    testing::{Golden, demo, path, relative_l2, values},
    tokenizer::PromptTokenizer,
};

/// The encoder of the demonstration model, at `taps`.
fn demo_encoder(taps: &[usize]) -> Result<Qwen3Encoder> {
    let folder = demo();
    let config = folder.json("text_encoder/config.json").expect("a config");
    Qwen3Encoder::load(&config, taps, folder.tensors("text_encoder").expect("tensors"), &LoadOptions::default())
}

#[test]
fn demo_prompts_equal_the_reference() {
    let encoder = demo_encoder(&[2, 4, 6]).expect("the demonstration encoder");
    let tokenizer = PromptTokenizer::load(&demo(), 64, None).expect("a tokenizer");
    for name in ["flux2-a", "flux2-b", "flux2-c"] {
        let golden = Golden::open(&format!("{name}.safetensors"));
        let tokens = tokenizer.encode(golden.meta("prompt")).expect("tokens");
        let embeds = encoder.forward(&tokens.ids, tokens.n_real).expect("embeddings");
        let error = relative_l2(&embeds, &golden.tensor("prompt_embeds"));
        println!("{name}: prompt_embeds relative L2 {error:.2e}");
        assert!(error <= 1e-5, "{name}: {error}");
    }
}

#[test]
fn a_random_encoder_equals_the_reference_with_and_without_padding() {
    let golden = Golden::open("qwen3-encoder.safetensors");
    let config: Qwen3Config = serde_json::from_str(golden.meta("config")).expect("a config");
    let taps: Vec<usize> = serde_json::from_str(golden.meta("text_encoder_out_layers")).expect("taps");
    let encoder = Qwen3Encoder::load(&config, &taps, golden.model(), &LoadOptions::default()).expect("an encoder");
    for case in ["padded", "one", "full"] {
        let ids = golden.ints(&format!("in.{case}.input_ids"));
        let n_real = golden.ints(&format!("in.{case}.attention_mask")).iter().sum::<u32>() as usize;
        let embeds = encoder.forward(&ids, n_real).expect("embeddings");
        let error = relative_l2(&embeds, &golden.tensor(&format!("out.{case}.prompt_embeds")));
        println!("{case}: prompt_embeds relative L2 {error:.2e}");
        assert!(error <= 1e-5, "{case}: {error}");
    }
}

const HIDDEN: usize = 12;
const INNER: usize = 10;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 6;
const VOCAB: usize = 9;

/// A small encoder with query width (24) other than the hidden size.
fn config(layers: usize) -> Qwen3Config {
    serde_json::from_value(json!({
        "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_hidden_layers": layers, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
        "vocab_size": VOCAB
    }))
    .expect("a config")
}

/// Values around zero that differ everywhere.
fn random(seed: u64, len: usize) -> Vec<f32> {
    sampling::NoiseGenerator::Philox.normal(seed, len)
}

/// Shape and values by name.
type Checkpoint = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Every tensor of a small checkpoint with `layers` layers.
fn checkpoint(prefix: &str, layers: usize) -> Checkpoint {
    let plan = expected(&config(layers + 1), &[layers], prefix);
    plan.into_iter()
        .enumerate()
        .map(|(i, tensor)| {
            let len = tensor.shape.iter().product();
            let values = random(i as u64, len);
            // Norm weights lie around 1.
            let values = if tensor.shape.len() == 1 { values.iter().map(|v| 1.0 + 0.2 * v).collect() } else { values };
            (tensor.name, (tensor.shape, values))
        })
        .collect()
}

fn source(tensors: &Checkpoint) -> Arc<dyn TensorSource> {
    let tensors: Vec<_> = tensors.iter().map(|(name, (shape, data))| TensorData::f32(name, shape, data)).collect();
    let file = weights::write::to_bytes(&tensors, &BTreeMap::new()).expect("a file");
    Arc::new(Safetensors::from_bytes(Arc::new(file), "test").expect("a source"))
}

fn load(tensors: &Checkpoint, layers: usize, taps: &[usize]) -> Result<Qwen3Encoder> {
    Qwen3Encoder::load(&config(layers), taps, source(tensors), &LoadOptions::default())
}

#[test]
fn streamed_layers_give_the_same_bits() {
    let tensors = checkpoint("model.", 5);
    let embeds = |streamed| {
        let options = LoadOptions::default();
        let encoder = Qwen3Encoder::load_streamed(&config(6), &[2, 5], source(&tensors), &options, streamed);
        let encoder = encoder.expect("an encoder");
        assert_eq!(encoder.streamed(), streamed.min(5));
        // The second pass finds other slots filled.
        [0; 2].map(|_| values(&encoder.forward(&[1, 2, 3, 0], 3).expect("embeddings")))
    };
    let want = embeds(0);
    for streamed in [1, 2, 3, 5, 9] {
        assert_eq!(embeds(streamed), want, "{streamed} streamed layers");
    }
}

/// The oracle: one layer in f64, keys and values of all rows, scores with an explicit mask.
struct Naive<'a> {
    tensors: &'a Checkpoint,
    n_real: usize,
}

type Rows = Vec<Vec<f64>>;

impl Naive<'_> {
    fn get(&self, name: &str) -> (&[usize], Vec<f64>) {
        let (shape, data) = &self.tensors[name];
        (shape, data.iter().map(|&v| f64::from(v)).collect())
    }

    fn linear(&self, x: &Rows, name: &str) -> Rows {
        let (shape, w) = self.get(name);
        let row =
            |x: &Vec<f64>| (0..shape[0]).map(|o| (0..shape[1]).map(|i| w[o * shape[1] + i] * x[i]).sum()).collect();
        x.iter().map(row).collect()
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let (_, w) = self.get(name);
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(&w).map(|(v, w)| v / (mean + 1e-6).sqrt() * w).collect()
    }

    /// Per-head norm and half-split rotation.
    fn rotated(&self, x: &[f64], position: usize, name: &str) -> Vec<f64> {
        let head = |x: &[f64]| {
            let x = self.norm(x, name);
            let half = HEAD_DIM / 2;
            let angle = |i: usize| position as f64 * 100f64.powf(-2.0 * i as f64 / HEAD_DIM as f64);
            let first = (0..half).map(|i| x[i] * angle(i).cos() - x[i + half] * angle(i).sin());
            let second = (0..half).map(|i| x[i + half] * angle(i).cos() + x[i] * angle(i).sin());
            first.chain(second).collect::<Vec<_>>()
        };
        x.chunks(HEAD_DIM).flat_map(head).collect()
    }

    fn layer(&self, x: &Rows, prefix: &str) -> Rows {
        let name = |part: &str| format!("{prefix}{part}.weight");
        let normed: Rows = x.iter().map(|x| self.norm(x, &name("input_layernorm"))).collect();
        let project = |part: &str| self.linear(&normed, &name(&format!("self_attn.{part}_proj")));
        let rotate = |rows: Rows, norm: &str| -> Rows {
            rows.iter().enumerate().map(|(p, x)| self.rotated(x, p, &name(&format!("self_attn.{norm}")))).collect()
        };
        let (q, k, v) = (rotate(project("q"), "q_norm"), rotate(project("k"), "k_norm"), project("v"));
        let attended: Rows = (0..x.len())
            .map(|row| {
                (0..HEADS)
                    .flat_map(|h| {
                        let part = |x: &[f64], h: usize| x[h * HEAD_DIM..(h + 1) * HEAD_DIM].to_vec();
                        let (q, kv) = (part(&q[row], h), h / (HEADS / KV_HEADS));
                        // The mask of the reference: causal, and the key is not padding.
                        let seen: Vec<usize> = (0..x.len()).filter(|&key| key <= row && key < self.n_real).collect();
                        let score = |key: usize| {
                            let k = part(&k[key], kv);
                            (q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() / (HEAD_DIM as f64).sqrt()).exp()
                        };
                        let total: f64 = seen.iter().map(|&key| score(key)).sum();
                        let mut out = vec![0.0; HEAD_DIM];
                        for &key in &seen {
                            for (out, v) in out.iter_mut().zip(part(&v[key], kv)) {
                                *out += score(key) / total * v;
                            }
                        }
                        out
                    })
                    .collect()
            })
            .collect();
        let add = |a: &Rows, b: Rows| -> Rows {
            a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
        };
        let x = add(x, self.linear(&attended, &name("self_attn.o_proj")));
        let normed: Rows = x.iter().map(|x| self.norm(x, &name("post_attention_layernorm"))).collect();
        let (gate, up) = (self.linear(&normed, &name("mlp.gate_proj")), self.linear(&normed, &name("mlp.up_proj")));
        let gated =
            gate.iter().zip(&up).map(|(g, u)| g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect());
        add(&x, self.linear(&gated.collect(), &name("mlp.down_proj")))
    }
}

#[test]
fn padding_rows_see_the_real_keys_and_nothing_else() {
    let tensors = checkpoint("", 2);
    let encoder = load(&tensors, 3, &[1, 2]).expect("an encoder");
    let ids = [3, 1, 4, 1, 5, 0, 0, 0, 0];
    for n_real in [1, 2, 5, 8, 9] {
        let naive = Naive { tensors: &tensors, n_real };
        let (_, table) = naive.get("embed_tokens.weight");
        let embed = |&id: &u32| table[id as usize * HIDDEN..(id as usize + 1) * HIDDEN].to_vec();
        let first = naive.layer(&ids.iter().map(embed).collect(), "layers.0.");
        let second = naive.layer(&first, "layers.1.");
        let want: Vec<f32> =
            first.iter().zip(&second).flat_map(|(a, b)| a.iter().chain(b)).map(|&v| v as f32).collect();
        let want = Tensor::from_vec(want, (1, ids.len(), 2 * HIDDEN), &Device::Cpu).expect("a tensor");
        let got = encoder.forward(&ids, n_real).expect("embeddings");
        let error = relative_l2(&got, &want);
        assert!(error <= 2e-6, "{n_real} real rows: {error}");
    }
}

#[test]
fn real_rows_do_not_depend_on_what_follows() {
    let encoder = load(&checkpoint("", 2), 3, &[2]).expect("an encoder");
    let long = encoder.forward(&[3, 1, 4, 0, 0, 0], 3).expect("embeddings");
    let other = encoder.forward(&[3, 1, 4, 8, 7, 6], 3).expect("embeddings");
    let short = encoder.forward(&[3, 1, 4], 3).expect("embeddings");
    let real = long.narrow(1, 0, 3).expect("rows");
    // Other row counts may take another path through the matrix product, so the last bits may differ.
    let error = relative_l2(&real, &short);
    assert!(error <= 1e-6, "{error}");
    assert_eq!(values(&real), values(&other.narrow(1, 0, 3).expect("rows")));
}

#[test]
fn taps_come_in_the_order_that_was_asked_for() {
    let tensors = checkpoint("", 2);
    let all = load(&tensors, 3, &[0, 1, 2]).expect("an encoder").forward(&[3, 1, 0], 2).expect("embeddings");
    let some = load(&tensors, 3, &[2, 0, 2]).expect("an encoder").forward(&[3, 1, 0], 2).expect("embeddings");
    let part = |x: &Tensor, i: usize| values(&x.narrow(2, i * HIDDEN, HIDDEN).expect("a tap"));
    for (i, from) in [(0, 2), (1, 0), (2, 2)] {
        assert_eq!(part(&some, i), part(&all, from));
    }
    let (_, embedding) = &tensors["embed_tokens.weight"];
    assert_eq!(part(&all, 0)[..HIDDEN], embedding[3 * HIDDEN..4 * HIDDEN]);
}

#[test]
fn prefixed_names_and_unused_parts_are_accepted() {
    let mut tensors = checkpoint("model.", 3);
    tensors.insert("lm_head.weight".to_owned(), (vec![VOCAB, HIDDEN], vec![0.5; VOCAB * HIDDEN]));
    tensors.insert("model.norm.weight".to_owned(), (vec![HIDDEN], vec![1.0; HIDDEN]));
    let prefixed = load(&tensors, 3, &[1, 2]).expect("an encoder").forward(&[3, 1, 0], 2).expect("embeddings");
    let bare = load(&checkpoint("", 3), 3, &[1, 2]).expect("an encoder").forward(&[3, 1, 0], 2).expect("embeddings");
    assert_eq!(values(&prefixed), values(&bare));
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let refused = |change: &dyn Fn(&mut Checkpoint)| {
        let mut tensors = checkpoint("", 2);
        change(&mut tensors);
        load(&tensors, 3, &[2]).expect_err("does not fit").to_string()
    };
    let message = refused(&|t| drop(t.remove("layers.1.mlp.up_proj.weight")));
    assert!(message.contains("layers.1.mlp.up_proj.weight"), "{message}");
    let message = refused(&|t| drop(t.insert("layers.7.surplus".to_owned(), (vec![1], vec![1.0]))));
    assert!(message.contains("layers.7.surplus"), "{message}");
    let message =
        refused(&|t| drop(t.insert("embed_tokens.weight".to_owned(), (vec![VOCAB, 4], vec![1.0; VOCAB * 4]))));
    assert!(message.contains("embed_tokens.weight"), "{message}");
    let message = refused(&|t| t.get_mut("embed_tokens.weight").expect("there").1[7] = f32::NAN);
    assert!(message.contains("embed_tokens.weight"), "{message}");
}

#[test]
fn the_last_hidden_state_and_no_taps_are_refused() {
    for taps in [&[][..], &[3], &[1, 7]] {
        let error = load(&checkpoint("", 2), 3, taps).expect_err("not a raw state");
        assert!(matches!(error, Error::Config { field: "text_encoder_out_layers", .. }), "{error}");
    }
}

#[test]
fn bad_ids_are_errors() {
    let encoder = load(&checkpoint("", 1), 2, &[1]).expect("an encoder");
    for id in [VOCAB as u32, u32::MAX] {
        assert!(matches!(encoder.forward(&[1, id], 2), Err(Error::TokenOutOfRange { vocab_size: VOCAB, .. })));
    }
    for (ids, n_real) in [(&[][..], 0), (&[1, 2], 0), (&[1, 2], 3)] {
        assert!(matches!(encoder.forward(ids, n_real), Err(Error::Shape { what: "ids", .. })));
    }
}

#[test]
fn an_observer_stops_between_layers() {
    let encoder = load(&checkpoint("", 2), 3, &[2]).expect("an encoder");
    let stop = |event: &Event<'_>| match event {
        Event::Progress { done: 1, total: 2 } => ControlFlow::Break(()),
        Event::Progress { .. } => panic!("went on after it was stopped"),
        _ => ControlFlow::Continue(()),
    };
    assert!(matches!(encoder.forward_observed(&[1, 2], 2, &stop), Err(Error::Cancelled(_))));
}

#[test]
fn published_checkpoints_are_used_in_full() {
    for (table, hidden_size, intermediate_size) in [("qwen3-4b.tsv", 2560, 9728), ("qwen3-8b.tsv", 4096, 12288)] {
        let config: Qwen3Config = serde_json::from_value::<Value>(json!({
            "head_dim": 128, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "vocab_size": 151936
        }))
        .and_then(serde_json::from_value)
        .expect("a config");
        let text = std::fs::read_to_string(path("models/names").join(table)).expect("a table");
        let mut names: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, shape) = line.split_once('\t').expect("name and shape");
            names.insert(name, shape.split(',').map(|d| d.parse().expect("a number")).collect());
        }
        let taps = [9, 18, 27];
        let plan = expected(&config, &taps, "model.");
        assert_eq!(plan.len(), 1 + 27 * 11);
        for tensor in &plan {
            assert_eq!(names.remove(tensor.name.as_str()).as_ref(), Some(&tensor.shape), "{}", tensor.name);
        }
        let ignored = ignored(&config, &taps, "model.");
        assert_eq!(names.keys().find(|name| !ignored(name)), None, "{table}");
        // Nine layers that are not needed and the final norm; the head is a tensor of its own in both tables.
        assert_eq!(names.len(), 9 * 11 + 2, "{table}");
    }
}
