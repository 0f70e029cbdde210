//! Which tensors are quantised. Publishers keep what is small or sensitive: everything outside of the repeated blocks, and
//! norms and modulation inside of them.

use std::fmt;

use super::Format;
use crate::{dtype::StoredDType, source::TensorInfo};

/// Why a tensor stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kept {
    /// It is no matrix of floats called `NAME.weight`.
    NoMatrix,
    /// It stands outside of the numbered blocks.
    OutsideBlocks,
    /// It belongs to a norm or to modulation.
    Modulation,
    /// Its rows are no whole number of groups.
    UnevenRows,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoMatrix => "that are no matrices",
            Self::OutsideBlocks => "outside of the blocks",
            Self::Modulation => "of norms and modulation",
            Self::UnevenRows => "whose rows are no whole number of groups",
        })
    }
}

/// Why a tensor is kept; none if it is to be quantised.
pub(super) fn kept(tensor: &TensorInfo, format: Format) -> Option<Kept> {
    let float = matches!(tensor.dtype, StoredDType::F64 | StoredDType::F32 | StoredDType::F16 | StoredDType::BF16);
    let &[rows, columns] = tensor.shape.as_slice() else { return Some(Kept::NoMatrix) };
    let Some(module) = tensor.name.strip_suffix(".weight").filter(|_| float && rows > 0 && columns > 0) else {
        return Some(Kept::NoMatrix);
    };
    if !is_in_block(module) {
        return Some(Kept::OutsideBlocks);
    }
    if module.split('.').any(is_modulation) {
        return Some(Kept::Modulation);
    }
    match format {
        Format::Int8ConvRot { group_size } if !columns.is_multiple_of(group_size.max(1)) => Some(Kept::UnevenRows),
        _ => None,
    }
}

/// Whether the path of a module leads through a numbered block. A number at its end is a place in a list of layers:
/// `final_layer.adaLN_modulation.1`.
fn is_in_block(module: &str) -> bool {
    let parts: Vec<&str> = module.split('.').collect();
    let number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    // The name of the blocks stands before the number.
    parts.get(1..parts.len() - 1).is_some_and(|inner| inner.iter().any(number))
}

fn is_modulation(part: &str) -> bool {
    let part = part.to_ascii_lowercase();
    part.contains("norm") || part.contains("modulation") || part.contains("adaln") || part.ends_with("_mod")
}

/// Whether this is what stands beside a quantised matrix.
pub(super) fn is_side_tensor(name: &str) -> bool {
    let side = ["weight_scale", "comfy_quant", "scale_weight", "weight_scale_inv", "input_scale", "scaled_fp8"];
    side.contains(&name.rsplit_once('.').map_or(name, |(_, last)| last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(name: &str, dtype: StoredDType, shape: &[usize]) -> Option<Kept> {
        let tensor = TensorInfo {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            bytes: 0..0,
            file: 0,
            quantisation: None,
        };
        kept(&tensor, Format::Int8ConvRot { group_size: 256 })
    }

    #[test]
    fn matrices_of_blocks_are_chosen_in_every_layout() {
        for name in [
            "transformer_blocks.0.attn.to_q.weight",
            "single_transformer_blocks.19.attn.to_qkv_mlp_proj.weight",
            "double_blocks.3.img_mlp.0.weight",
            "model.diffusion_model.single_blocks.7.linear1.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "blocks.29.ffn.2.weight",
        ] {
            assert_eq!(why(name, StoredDType::BF16, &[8, 512]), None, "{name}");
        }
    }

    #[test]
    fn everything_else_is_kept() {
        use Kept::{Modulation, NoMatrix, OutsideBlocks, UnevenRows};
        for (name, reason) in [
            ("x_embedder.weight", OutsideBlocks),
            ("model.embed_tokens.weight", OutsideBlocks),
            ("final_layer.adaLN_modulation.1.weight", OutsideBlocks),
            ("text_embedding.0.weight", OutsideBlocks),
            ("double_stream_modulation_img.linear.weight", OutsideBlocks),
            ("transformer_blocks.0.norm1.linear.weight", Modulation),
            ("double_blocks.0.img_mod.lin.weight", Modulation),
            ("transformer_blocks.0.scale_shift_table", NoMatrix),
        ] {
            assert_eq!(why(name, StoredDType::BF16, &[8, 512]), Some(reason), "{name}");
        }
        let name = "blocks.0.q.weight";
        assert_eq!(why(name, StoredDType::BF16, &[8, 500]), Some(UnevenRows));
        assert_eq!(why(name, StoredDType::BF16, &[8]), Some(NoMatrix));
        assert_eq!(why(name, StoredDType::BF16, &[0, 512]), Some(NoMatrix));
        assert_eq!(why(name, StoredDType::I64, &[8, 512]), Some(NoMatrix));
        assert!(is_side_tensor("blocks.0.q.weight_scale") && is_side_tensor("scaled_fp8"));
        assert!(!is_side_tensor("blocks.0.scale_shift_table"));
    }
}
