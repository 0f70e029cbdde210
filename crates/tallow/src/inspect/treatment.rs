//! What this program does with a set of tensors.

use weights::inspect::{Part, Quantised};

use crate::terminal;

/// Rows of the report, for people: quantisation, how it is computed with, and which command takes the file.
pub(super) fn rows(part: &Part) -> Vec<(&'static str, String)> {
    let mut rows: Vec<(&'static str, String)> = Vec::new();
    for (index, quantised) in part.quantised.iter().enumerate() {
        rows.push((if index == 0 { "quantised" } else { "" }, amount(quantised)));
    }
    rows.extend(computed(&part.quantised).map(|text| ("computed", text)));
    rows.extend(used_by(part).map(|text| ("used by", text)));
    rows
}

fn amount(quantised: &Quantised) -> String {
    let Quantised { description, tensors, bytes, .. } = quantised;
    format!("{description}: {tensors} tensors, {}", terminal::bytes(*bytes))
}

/// How quantised matrices take part in a product.
fn computed(quantised: &[Quantised]) -> Option<String> {
    let unsupported: Vec<&str> =
        quantised.iter().filter(|quantised| !quantised.supported).map(|quantised| quantised.format.as_str()).collect();
    if !unsupported.is_empty() {
        return Some(format!("not: {} cannot be decoded here", unsupported.join(", ")));
    }
    let rotated = quantised.iter().any(|quantised| quantised.convrot.is_some());
    let rotation = if rotated { " and rotated back" } else { "" };
    (!quantised.is_empty()).then(|| {
        format!(
            "on the CPU as stored, rows widened{rotation} as a product needs them; on CUDA widened once, unless --quant \
             says otherwise"
        )
    })
}

/// The command that takes the file, by the model that it looks like.
fn used_by(part: &Part) -> Option<String> {
    let model = part.model.as_ref()?;
    let option = match model.model {
        "FLUX.2 transformer" => "generate --transformer",
        "FLUX.2 VAE" => "generate --vae",
        "Qwen3 language model" => "generate --text-encoder",
        "Wan video VAE" | "LTX video VAE" => "decode --vae, encode --vae",
        "LTX-2 diffusion decoder" => "decode --vae",
        _ => return Some("no command of this program".to_owned()),
    };
    // A component is found by itself in its folder.
    part.component.is_empty().then(|| {
        // Those of videos are read under all names alike.
        let own = matches!(model.layout, "diffusers" | "transformers") || !option.starts_with("generate");
        let names = if own { String::new() } else { format!("; its {} names are translated", model.layout) };
        format!("tallow {option}{names}")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weights::{
        Safetensors,
        write::{TensorData, to_bytes},
    };

    use super::*;

    fn lines(tensors: &[TensorData<'_>]) -> Vec<String> {
        let bytes = to_bytes(tensors, &Default::default()).unwrap();
        let source = Safetensors::from_bytes(Arc::new(bytes), "made").unwrap();
        let part = Part::new("", &source).unwrap();
        rows(&part).into_iter().map(|(name, value)| format!("{name} {value}")).collect()
    }

    fn marked(format: &str) -> Vec<TensorData<'static>> {
        let text = format!(r#"{{"format":"{format}","convrot":true,"convrot_groupsize":16}}"#).into_bytes();
        vec![
            TensorData::f32("img_in.weight", &[2, 16], &[0.5; 32]),
            TensorData::f32("double_stream_modulation_img.lin.weight", &[2, 16], &[0.5; 32]),
            TensorData::new("double_blocks.0.img_mlp.0.weight", weights::StoredDType::I8, &[2, 16], vec![1; 32]),
            TensorData::f32("double_blocks.0.img_mlp.0.weight_scale", &[2, 1], &[0.5; 2]),
            TensorData::new(
                "double_blocks.0.img_mlp.0.comfy_quant",
                weights::StoredDType::U8,
                &[text.len()],
                text.clone(),
            ),
        ]
    }

    #[test]
    fn a_quantised_file_says_what_becomes_of_it() {
        let lines = lines(&marked("int8_tensorwise"));
        assert!(lines[0].starts_with("quantised int8_tensorwise") && lines[0].contains("1 tensors"), "{lines:?}");
        assert!(lines[1].starts_with("computed ") && lines[1].contains("rotated back"), "{lines:?}");
        assert_eq!(lines[2], "used by tallow generate --transformer; its BFL names are translated");
    }

    #[test]
    fn what_cannot_be_decoded_is_said() {
        let lines = lines(&marked("nvfp4"));
        assert!(lines.iter().any(|line| line.contains("not: nvfp4 cannot be decoded")), "{lines:?}");
    }

    #[test]
    fn a_plain_file_of_another_program_has_no_use_here() {
        assert_eq!(lines(&[TensorData::f32("w", &[1], &[1.0])]), [""; 0]);
        let clip = TensorData::f32("text_model.encoder.layers.0.self_attn.q_proj.weight", &[1, 1], &[1.0]);
        assert_eq!(lines(&[clip]), ["used by no command of this program"]);
    }
}
