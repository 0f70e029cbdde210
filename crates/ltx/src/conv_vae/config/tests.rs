use super::*;
use crate::conv_vae::{names::expected, testing};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Parameters of the networks, without the statistics.
fn parameters(architecture: &Architecture, part: &str) -> usize {
    let list = expected(architecture).unwrap();
    list.iter().filter(|e| e.name.starts_with(part)).map(|e| e.shape.iter().product::<usize>()).sum()
}

#[test]
fn the_published_configurations_have_the_published_numbers_of_parameters() {
    let new = from_original(&json(testing::LTX23)).unwrap();
    assert_eq!((parameters(&new, "encoder."), parameters(&new, "decoder.")), (318_936_897, 407_169_072));
    // 170 tensors, as the file has.
    assert_eq!(expected(&new).unwrap().len(), 170);
    let decoder = new.decoder.as_ref().unwrap();
    assert_eq!((decoder.width, decoder.causality, decoder.padding), (1024, Causality::Centred, SpatialPadding::Zeros));
    assert!(!decoder.timestep_conditioning);
    assert_eq!(decoder.factors(), [8, 8, 8]);
    assert_eq!(new.encoder.as_ref().unwrap().factors(), [8, 8, 8]);

    let old = from_original(&json(testing::LTX20)).unwrap();
    assert_eq!((parameters(&old, "encoder."), parameters(&old, "decoder.")), (694_098_881, 528_380_720));
    assert_eq!(old.decoder.as_ref().unwrap().padding, SpatialPadding::Reflect);
    assert_eq!(old.encoder.as_ref().unwrap().padding, SpatialPadding::Zeros);
    assert_eq!(expected(&old).unwrap().len(), 184);
}

#[test]
fn both_kinds_of_configuration_describe_the_same_networks() {
    let theirs = from_diffusers(&json(testing::LTX20_DIFFUSERS)).unwrap();
    assert_eq!(theirs, from_original(&json(testing::LTX20)).unwrap());
    let theirs = from_diffusers(&json(testing::LTX23_DIFFUSERS)).unwrap();
    assert_eq!(theirs, from_original(&json(testing::LTX23)).unwrap());
}

#[test]
fn a_file_with_the_diffusion_decoder_gives_its_encoder() {
    let mut nested = json(testing::LTX23);
    let blocks = nested["encoder_blocks"].clone();
    nested = json(r#"{"_class_name": "CausalDiffusionVAE", "decoder": {"_class_name": "NADiffusionDecoder"}}"#);
    nested["encoder"] = json(r#"{"in_channels": 3, "out_channels": 128, "base_channels": 128, "patch_size": 4}"#);
    nested["encoder"]["blocks"] = blocks;
    let architecture = from_original(&nested).unwrap();
    assert_eq!(architecture.encoder, from_original(&json(testing::LTX23)).unwrap().encoder);
    assert_eq!(architecture.decoder, None);
}

#[test]
fn timestep_conditioning_is_on_where_nothing_is_said() {
    let mut config = json(testing::LTX23);
    config.as_object_mut().unwrap().remove("timestep_conditioning");
    assert!(from_original(&config).unwrap().decoder.unwrap().timestep_conditioning);
}

#[test]
fn what_is_wrong_is_named() {
    let broken = |key: &str, value: &str| {
        let mut config = json(testing::LTX23);
        config[key] = json(value);
        from_original(&config).unwrap_err().to_string()
    };
    for (key, value, want) in [
        ("latent_channels", "null", "config `vae.latent_channels` is missing"),
        ("latent_channels", "0", "config `latent_channels` is 0, expected 1 to 65536"),
        ("patch_size", "-1", "config `vae.patch_size` is not a whole number"),
        ("norm_layer", "\"group_norm\"", "config `vae.norm_layer` is \"group_norm\", expected \"pixel_norm\""),
        ("decoder_blocks", "3", "config `vae.blocks` is no list of at most 64 blocks"),
        ("decoder_blocks", "[[\"attn\", {}]]", "config `vae.blocks[0]` is \"attn\", which is not supported"),
        ("encoder_blocks", "[7]", "config `vae.blocks[0]` is not a name and its parameters"),
        (
            "spatial_padding_mode",
            "\"circular\"",
            "config `vae.spatial_padding_mode` is \"circular\", expected \"zeros\" or \"reflect\"",
        ),
    ] {
        assert_eq!(broken(key, value), want);
    }
    assert!(broken("encoder_blocks", r#"[["compress_all_res", {"multiplier": 4000000000}]]"#).contains("channels"));
    assert!(from_original(&json("3")).is_err());
    let mut config = json(testing::LTX23_DIFFUSERS);
    config["upsample_type"] = json("[\"spatial\"]");
    let message = from_diffusers(&config).unwrap_err().to_string();
    assert_eq!(message, "config `upsample_type` has 1 entries, expected 4");
}
