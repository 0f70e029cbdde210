//! Schedules and steps against diffusers (`tests/reference/sampling.py` makes the data).

use sampling::{FlowMatchEuler, empirical_mu};
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("data/flow_match.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|x| x as f32).collect()
}

fn count(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn largest_difference(ours: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    ours.iter().zip(reference).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn schedules_agree_with_diffusers() {
    let golden = golden();
    let schedules = golden["schedules"].as_array().unwrap();
    assert_eq!(schedules.len(), 9 * 6);
    let mut worst = 0.0_f64;
    for row in schedules {
        let (seq, steps) = (count(&row["image_seq_len"]), count(&row["num_inference_steps"]));
        let mu = row["mu"].as_f64().unwrap();
        assert!((empirical_mu(seq, steps) - mu).abs() < 1e-12, "{seq} tokens, {steps} steps: {mu}");

        let sampler = FlowMatchEuler::new(seq, steps).unwrap();
        worst = worst.max(largest_difference(sampler.sigmas(), &numbers(&row["sigmas"])));
        let timesteps: Vec<f64> = numbers(&row["timesteps"]).into_iter().map(|t| t / 1000.0).collect();
        worst = worst.max(largest_difference(sampler.timesteps(), &timesteps));
    }
    // Two roundings of numbers below 1: diffusers computes in f32.
    assert!(worst <= 1.2e-7, "{worst:e}");
}

#[test]
fn steps_agree_with_diffusers() {
    let euler = &golden()["euler"];
    let sampler = FlowMatchEuler::new(count(&euler["image_seq_len"]), count(&euler["num_inference_steps"])).unwrap();
    let steps = euler["steps"].as_array().unwrap();
    assert_eq!(steps.len(), sampler.num_inference_steps());
    for (index, row) in steps.iter().enumerate() {
        let mut latents = floats(&row["latents"]);
        sampler.step(index, &mut latents, &floats(&row["velocity"])).unwrap();
        let worst = largest_difference(&latents, &numbers(&row["after"]));
        // The last digit of a sigma times a velocity of up to 3, and one rounding of the sum.
        assert!(worst <= 6e-7, "step {index}: {worst:e}");
    }
}
