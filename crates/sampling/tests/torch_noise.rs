//! `torch-cpu` noise against torch (`tests/reference/torch_noise.py` makes the data).

use std::collections::BTreeSet;

use sampling::NoiseGenerator;
use serde_json::Value;

struct Piece {
    seed: u64,
    len: usize,
    offset: usize,
    values: Vec<f32>,
}

fn pieces() -> Vec<Piece> {
    let golden: Value = serde_json::from_str(include_str!("data/torch_noise.json")).unwrap();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    let pieces = golden["pieces"].as_array().unwrap().iter().map(|row| {
        let bits = row["bits"].as_str().unwrap();
        let word = |i: usize| u32::from_str_radix(&bits[8 * i..8 * i + 8], 16).unwrap();
        Piece {
            seed: number(row, "seed"),
            len: number(row, "len") as usize,
            offset: number(row, "offset") as usize,
            values: (0..bits.len() / 8).map(|i| f32::from_bits(word(i))).collect(),
        }
    });
    pieces.collect()
}

#[test]
fn values_agree_with_torch() {
    let pieces = pieces();
    let mut worst = 0.0_f32;
    for Piece { seed, len, offset, values } in &pieces {
        assert!(!values.is_empty() && offset + values.len() <= *len);
        let ours = NoiseGenerator::TorchCpu.normal(*seed, *len);
        for (i, (a, b)) in ours[*offset..].iter().zip(values).enumerate() {
            let difference = (a - b).abs();
            worst = worst.max(difference);
            assert!(difference <= 5e-7, "seed {seed}, value {} of {len}: {a} {b}", offset + i);
            assert!(*len >= 16 || a.to_bits() == b.to_bits(), "seed {seed}, value {} of {len}: {a} {b}", offset + i);
        }
    }
    assert!(worst > 0.0, "nothing was compared");
}

#[test]
fn the_data_cover_both_rules_the_tail_and_wide_seeds() {
    let pieces = pieces();
    let lengths: BTreeSet<_> = pieces.iter().filter(|p| p.seed == 42).map(|p| p.len).collect();
    assert!((1..=200).all(|len| lengths.contains(&len)));
    let seeds: BTreeSet<_> = pieces.iter().map(|p| p.seed).collect();
    for seed in [0, 1, 42, 1 << 32, (1 << 32) + 5, 1 << 63, u64::MAX] {
        assert!(seeds.contains(&seed), "{seed}");
    }
    assert!(pieces.iter().any(|p| p.len > 500_000));
}

#[test]
fn only_the_low_half_of_the_seed_counts() {
    for len in [5, 16, 50] {
        let noise = |seed| NoiseGenerator::TorchCpu.normal(seed, len);
        assert_eq!(noise(5), noise((1 << 32) + 5));
        assert_ne!(noise(5), noise(6));
    }
}
