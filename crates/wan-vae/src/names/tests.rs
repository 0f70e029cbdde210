use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const WAN21: NameMap = NameMap { nested: false, encoder_blocks: 2, decoder_blocks: 3 };
const WAN22: NameMap = NameMap { nested: true, encoder_blocks: 2, decoder_blocks: 3 };

/// Rows of original name, diffusers name, shape.
fn layouts(text: &'static str) -> Vec<(&'static str, &'static str, &'static str)> {
    let rows = text.lines().filter(|line| !line.starts_with('#'));
    rows.map(|line| {
        let mut cells = line.split('\t');
        (cells.next().unwrap(), cells.next().unwrap(), cells.next().unwrap())
    })
    .collect()
}

#[test]
fn published_tables_follow_from_the_rules_both_ways() {
    let cases = [
        (
            WAN21,
            194,
            include_str!("../../../../tests/models/names/wan21-vae.layouts.tsv"),
            &[
                include_str!("../../../../tests/models/names/wan21-vae.tsv"),
                include_str!("../../../../tests/models/names/qwen-image-vae.tsv"),
            ][..],
        ),
        (
            WAN22,
            196,
            include_str!("../../../../tests/models/names/wan22-vae.layouts.tsv"),
            &[include_str!("../../../../tests/models/names/wan22-vae.tsv")],
        ),
    ];
    for (map, count, pairs, diffusers) in cases {
        let rows = layouts(pairs);
        assert_eq!(rows.len(), count);
        for &(original, diffusers, _) in &rows {
            assert_eq!(map.to_diffusers(original).as_deref(), Some(diffusers));
            assert_eq!(map.to_original(diffusers).as_deref(), Some(original));
        }
        // The class of the diffusers library has exactly these names and shapes.
        let known: BTreeSet<_> = rows.iter().map(|&(_, diffusers, shape)| (diffusers, shape)).collect();
        assert_eq!(known.len(), count);
        for table in diffusers {
            let table: BTreeSet<_> = table
                .lines()
                .filter(|line| !line.starts_with('#'))
                .map(|line| line.split_once('\t').unwrap())
                .collect();
            assert_eq!(table, known);
        }
    }
}

/// With one block per encoder stage, as the demonstration model has it.
#[test]
fn other_numbers_of_blocks_shift_the_lists() {
    let map = NameMap { nested: false, encoder_blocks: 1, decoder_blocks: 2 };
    for (original, diffusers) in [
        ("encoder.downsamples.0.residual.2.weight", "encoder.down_blocks.0.conv1.weight"),
        ("encoder.downsamples.1.resample.1.bias", "encoder.down_blocks.1.resample.1.bias"),
        ("encoder.downsamples.5.time_conv.weight", "encoder.down_blocks.5.time_conv.weight"),
        ("decoder.upsamples.1.residual.0.gamma", "decoder.up_blocks.0.resnets.1.norm1.gamma"),
        ("decoder.upsamples.2.resample.1.weight", "decoder.up_blocks.0.upsamplers.0.resample.1.weight"),
        ("decoder.upsamples.3.shortcut.weight", "decoder.up_blocks.1.resnets.0.conv_shortcut.weight"),
        ("decoder.upsamples.5.time_conv.bias", "decoder.up_blocks.1.upsamplers.0.time_conv.bias"),
    ] {
        assert_eq!(map.to_diffusers(original).as_deref(), Some(diffusers));
        assert_eq!(map.to_original(diffusers).as_deref(), Some(original));
    }
    let map = NameMap { nested: true, encoder_blocks: 1, decoder_blocks: 2 };
    for (original, diffusers) in [
        ("encoder.downsamples.3.downsamples.0.residual.6.bias", "encoder.down_blocks.3.resnets.0.conv2.bias"),
        ("encoder.downsamples.2.downsamples.1.time_conv.bias", "encoder.down_blocks.2.downsampler.time_conv.bias"),
        ("decoder.upsamples.4.upsamples.2.resample.1.bias", "decoder.up_blocks.4.upsampler.resample.1.bias"),
    ] {
        assert_eq!(map.to_diffusers(original).as_deref(), Some(diffusers));
        assert_eq!(map.to_original(diffusers).as_deref(), Some(original));
    }
}

#[test]
fn other_names_are_not_translated() {
    for name in [
        "",
        "weight",
        ".weight",
        "conv3.weight",
        "encoder.weight",
        "encoder.conv2.weight",
        "decoder.head.1.weight",
        "decoder.middle.3.residual.0.gamma",
        "decoder.middle.1.residual.0.gamma",
        "decoder.middle.0.to_qkv.weight",
        "decoder.upsamples.x.residual.0.gamma",
        "decoder.upsamples.00.residual.0.gamma",
        "decoder.upsamples.99999999999999999999999.residual.0.gamma",
        "decoder.upsamples.0.resample.1.weight",
        "decoder.upsamples.3.residual.2.weight",
        "decoder.upsamples.0.upsamples.0.residual.2.weight",
        "decoder.downsamples.0.residual.2.weight",
        "encoder.downsamples.2.residual.2.weight",
        "encoder.downsamples.2.resample.0.weight",
        "decoder.conv_in.weight",
    ] {
        assert_eq!(WAN21.to_diffusers(name), None, "{name}");
    }
    for name in [
        "decoder.up_blocks.0.resnets.3.conv1.weight",
        "decoder.up_blocks.0.upsampler.resample.1.weight",
        "decoder.up_blocks.0.upsamplers.1.resample.1.weight",
        "encoder.down_blocks.0.resnets.0.conv1.weight",
        "encoder.down_blocks.2.conv1.weight",
        "decoder.mid_block.attentions.0.conv1.weight",
        "decoder.conv1.weight",
    ] {
        assert_eq!(WAN21.to_original(name), None, "{name}");
    }
    assert_eq!(WAN22.to_diffusers("decoder.upsamples.0.upsamples.4.residual.2.weight"), None);
    assert_eq!(WAN22.to_original("encoder.down_blocks.0.downsamplers.0.resample.1.weight"), None);
}

fn map() -> impl Strategy<Value = NameMap> {
    (any::<bool>(), 1usize..6, 1usize..6).prop_map(|(nested, encoder_blocks, decoder_blocks)| NameMap {
        nested,
        encoder_blocks,
        decoder_blocks,
    })
}

fn original_name() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![("encoder", "downsamples"), ("decoder", "upsamples")]);
    let piece = prop::sample::select(vec![
        "residual.0.gamma",
        "residual.6.bias",
        "shortcut.weight",
        "resample.1.weight",
        "time_conv.bias",
    ]);
    (part, 0usize..30, prop::option::of(0usize..6), piece).prop_map(|((part, list), i, j, piece)| match j {
        Some(j) => format!("{part}.{list}.{i}.{list}.{j}.{piece}"),
        None => format!("{part}.{list}.{i}.{piece}"),
    })
}

proptest! {
    /// Whatever has a name in the other layout comes back from there.
    #[test]
    fn translation_is_its_own_inverse(map in map(), name in original_name()) {
        if let Some(diffusers) = map.to_diffusers(&name) {
            prop_assert_eq!(map.to_original(&diffusers), Some(name));
        }
    }

    /// Any text: no panic.
    #[test]
    fn any_text_is_taken(map in map(), name in "(encoder|decoder|conv1)?[.](downsamples|up_blocks|middle)?[.0-9a-z_]{0,40}") {
        let _ = (map.to_diffusers(&name), map.to_original(&name));
    }
}
