use serde_json::{Value, json};

use super::*;

/// `transformer/config.json` of FLUX.2 klein 4B, distilled and base.
fn klein_4b() -> Value {
    json!({
        "_class_name": "Flux2Transformer2DModel", "_diffusers_version": "0.37.0.dev0",
        "attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32], "eps": 1e-06, "guidance_embeds": false,
        "in_channels": 128, "joint_attention_dim": 7680, "mlp_ratio": 3.0, "num_attention_heads": 24,
        "num_layers": 5, "num_single_layers": 20, "out_channels": null, "patch_size": 1, "rope_theta": 2000,
        "timestep_guidance_channels": 256
    })
}

/// `transformer/config.json` of FLUX.2 klein 9B, distilled and base.
fn klein_9b() -> Value {
    with(
        klein_4b(),
        json!({"joint_attention_dim": 12288, "num_attention_heads": 32, "num_layers": 8, "num_single_layers": 24}),
    )
}

/// `transformer/config.json` of FLUX.2 dev: older, without `guidance_embeds`.
fn dev() -> Value {
    let mut dev = with(
        klein_4b(),
        json!({"joint_attention_dim": 15360, "num_attention_heads": 48, "num_layers": 8, "num_single_layers": 48}),
    );
    dev.as_object_mut().expect("object").remove("guidance_embeds");
    dev
}

/// `vae/config.json` of FLUX.2.
fn vae() -> Value {
    json!({
        "_class_name": "AutoencoderKLFlux2", "_diffusers_version": "0.36.0.dev0", "act_fn": "silu",
        "batch_norm_eps": 0.0001, "batch_norm_momentum": 0.1, "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"],
        "force_upcast": true, "in_channels": 3, "latent_channels": 32, "layers_per_block": 2,
        "mid_block_add_attention": true, "norm_num_groups": 32, "out_channels": 3, "patch_size": [2, 2],
        "sample_size": 1024,
        "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"],
        "use_post_quant_conv": true, "use_quant_conv": true
    })
}

/// `text_encoder/config.json` of Qwen3-4B.
fn qwen3_4b() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
    })
}

/// `base` with the keys of `changes`; null stays null.
fn with(mut base: Value, changes: Value) -> Value {
    let object = base.as_object_mut().expect("object");
    object.extend(changes.as_object().expect("object").clone());
    base
}

fn transformer(value: Value) -> Result<TransformerConfig> {
    let config: TransformerConfig = serde_json::from_value(value).expect("parses");
    config.validate().map(|()| config)
}

fn vae_config(value: Value) -> Result<VaeConfig> {
    let config: VaeConfig = serde_json::from_value(value).expect("parses");
    config.validate().map(|()| config)
}

fn qwen3(value: Value) -> Result<Qwen3Config> {
    let config: Qwen3Config = serde_json::from_value(value).expect("parses");
    config.validate().map(|()| config)
}

/// The key that an error complains about.
fn field<T: std::fmt::Debug>(result: Result<T>) -> &'static str {
    match result {
        Err(Error::Config { field, .. }) => field,
        other => panic!("expected a config error, got {other:?}"),
    }
}

#[test]
fn published_transformers() {
    for (json, hidden, mlp, blocks, guidance) in [
        (klein_4b(), 3072, 9216, (5, 20), false),
        (klein_9b(), 4096, 12288, (8, 24), false),
        (dev(), 6144, 18432, (8, 48), true),
    ] {
        let config = transformer(json).expect("published");
        assert_eq!(config.hidden_size(), hidden);
        assert_eq!(config.mlp_hidden_size(), mlp);
        assert_eq!((config.num_layers, config.num_single_layers), blocks);
        assert_eq!((config.in_channels, config.out_channels()), (128, 128));
        assert_eq!(config.guidance_embeds, guidance);
        assert_eq!((config.rope_theta, config.eps), (2000.0, 1e-6));
    }
}

#[test]
fn published_vae() {
    let config = vae_config(vae()).expect("published");
    assert_eq!((config.packed_channels(), config.packed_factor()), (128, 16));
    assert_eq!(config.decoder_block_out_channels(), [128, 256, 512, 512]);
    let small = vae_config(with(vae(), json!({"decoder_block_out_channels": [96, 192, 384, 384]}))).expect("published");
    assert_eq!(small.decoder_block_out_channels(), [96, 192, 384, 384]);
    assert_eq!(small.block_out_channels, [128, 256, 512, 512]);
}

#[test]
fn published_text_encoders() {
    let config = qwen3(qwen3_4b()).expect("published");
    assert_eq!(config.rope_theta().expect("there"), 1e6);
    assert_eq!(config.num_attention_heads * config.head_dim, 4096);
    let changes = json!({"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": false});
    assert_eq!(qwen3(with(qwen3_4b(), changes)).expect("published").hidden_size, 4096);
}

#[test]
fn rope_theta_has_two_places_and_no_default() {
    let rope = json!({"rope_theta": null, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}});
    assert_eq!(qwen3(with(qwen3_4b(), rope)).expect("transformers 5").rope_theta().expect("there"), 5e5);
    assert_eq!(field(qwen3(with(qwen3_4b(), json!({"rope_theta": null})))), "rope_theta");
}

#[test]
fn demo_configs() {
    let folder = crate::testing::demo();
    let transformer: TransformerConfig = folder.json("transformer/config.json").expect("parses");
    transformer.validate().expect("valid");
    assert_eq!((transformer.hidden_size(), transformer.joint_attention_dim), (160, 288));
    let vae: VaeConfig = folder.json("vae/config.json").expect("parses");
    vae.validate().expect("valid");
    assert_eq!((vae.packed_channels(), vae.packed_factor()), (128, 16));
    let qwen3: Qwen3Config = folder.json("text_encoder/config.json").expect("parses");
    qwen3.validate().expect("valid");
    assert_eq!((qwen3.rope_theta().expect("there"), qwen3.pad_token_id), (1e6, Some(0)));
}

#[test]
fn widths_have_no_default() {
    for key in ["num_layers", "num_attention_heads", "attention_head_dim", "joint_attention_dim", "axes_dims_rope"] {
        let mut json = klein_4b();
        json.as_object_mut().expect("object").remove(key);
        let error = serde_json::from_value::<TransformerConfig>(json).expect_err("incomplete").to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_flux1_transformer_is_refused() {
    let flux1 = json!({"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [16, 56, 56]});
    assert_eq!(field(transformer(with(klein_4b(), flux1))), "_class_name");
}

#[test]
fn impossible_transformers_are_refused() {
    for (changes, key) in [
        (json!({"axes_dims_rope": [16, 56, 56]}), "axes_dims_rope"),
        (json!({"axes_dims_rope": [32, 32, 32, 16]}), "axes_dims_rope"),
        (json!({"axes_dims_rope": [33, 31, 32, 32]}), "axes_dims_rope"),
        (json!({"axes_dims_rope": [usize::MAX - 1, 32, 32, 66]}), "axes_dims_rope"),
        (json!({"num_attention_heads": 0}), "num_attention_heads"),
        (json!({"num_attention_heads": 4096}), "num_attention_heads"),
        (json!({"num_layers": 0, "num_single_layers": 0}), "num_layers"),
        (json!({"num_single_layers": 5000}), "num_single_layers"),
        (json!({"timestep_guidance_channels": 255}), "timestep_guidance_channels"),
        (json!({"out_channels": 64}), "out_channels"),
        (json!({"patch_size": 2}), "patch_size"),
        (json!({"mlp_ratio": -1.0}), "mlp_ratio"),
        (json!({"mlp_ratio": 1e9}), "mlp_ratio"),
        (json!({"rope_theta": 0.0}), "rope_theta"),
        (json!({"eps": 0.0}), "eps"),
    ] {
        assert_eq!(field(transformer(with(klein_4b(), changes.clone()))), key, "{changes}");
    }
}

#[test]
fn impossible_vaes_are_refused() {
    for (changes, key) in [
        (json!({"_class_name": "AutoencoderKL"}), "_class_name"),
        (json!({"block_out_channels": []}), "block_out_channels"),
        (json!({"block_out_channels": [130, 256]}), "block_out_channels"),
        (json!({"block_out_channels": vec![32; 60]}), "block_out_channels"),
        (json!({"decoder_block_out_channels": [96]}), "decoder_block_out_channels"),
        (json!({"norm_num_groups": 0}), "norm_num_groups"),
        (json!({"latent_channels": 0}), "latent_channels"),
        (json!({"patch_size": [1, 1]}), "patch_size"),
        (json!({"act_fn": "gelu"}), "act_fn"),
        (json!({"in_channels": 4}), "in_channels"),
        (json!({"batch_norm_eps": -1.0}), "batch_norm_eps"),
    ] {
        assert_eq!(field(vae_config(with(vae(), changes.clone()))), key, "{changes}");
    }
}

#[test]
fn impossible_text_encoders_are_refused() {
    for (changes, key) in [
        (json!({"model_type": "llama"}), "model_type"),
        (json!({"num_key_value_heads": 5}), "num_key_value_heads"),
        (json!({"num_key_value_heads": 0}), "num_key_value_heads"),
        (json!({"head_dim": 127}), "head_dim"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"use_sliding_window": true}), "use_sliding_window"),
        (json!({"rope_scaling": {"type": "yarn"}}), "rope_scaling"),
        (json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}), "rope_parameters.rope_type"),
        (json!({"vocab_size": 0}), "vocab_size"),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
    ] {
        assert_eq!(field(qwen3(with(qwen3_4b(), changes.clone()))), key, "{changes}");
    }
}
