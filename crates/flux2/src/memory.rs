//! What a run takes on a device of its own, from shapes alone, and the way to run it that fits a limit.

use std::fmt;

use candle_core::DType;

use crate::{
    config::{Qwen3Config, TransformerConfig, VaeConfig},
    error::{Error, Result},
    options::Residency,
    streaming::BlockLayout,
    text_encoder::{highest, layer_expected},
    transformer::{DoubleBlock, Flux2Transformer, SingleBlock, StreamedBlocks, Widths},
    vae::{Bands, Flux2Vae},
};

/// What the driver and the libraries take beside tensors: context, kernels, workspaces of products and convolutions.
pub(crate) const OVERHEAD: u64 = 640 << 20;

/// Most bytes of scores and column buffers at a time.
const SCRATCH: u64 = 256 << 20;

/// Places of streamed blocks on the device.
const SLOTS: u64 = 2;

/// The shapes of a model and of a run.
#[derive(Debug, Clone, Copy)]
pub struct Shapes<'a> {
    /// Text encoder.
    pub text_encoder: &'a Qwen3Config,
    /// Hidden states that are taken of it.
    pub out_layers: &'a [usize],
    /// Transformer.
    pub transformer: &'a TransformerConfig,
    /// VAE.
    pub vae: &'a VaeConfig,
    /// Element type of weights and activations.
    pub dtype: DType,
    /// Tokens of the text.
    pub text_tokens: usize,
    /// Height of the picture in pixels.
    pub height: usize,
    /// Width of the picture in pixels.
    pub width: usize,
}

/// Bytes of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stage {
    /// Weights that lie on the device, slots of streamed ones included.
    pub weights: u64,
    /// What its hungriest layer holds at once.
    pub activations: u64,
}

impl Stage {
    fn total(self) -> u64 {
        self.weights.saturating_add(self.activations)
    }
}

/// How a picture is made within a limit. An estimate; [`fmt::Display`] tells it in a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Text encoder.
    pub text_encoder: Stage,
    /// Its layers that are streamed from the host.
    pub streamed_layers: usize,
    /// Transformer.
    pub transformer: Stage,
    /// Its blocks that are streamed from the host.
    pub streamed_blocks: StreamedBlocks,
    /// VAE.
    pub vae: Stage,
    /// Whether it decodes in bands.
    pub vae_in_bands: bool,
    /// Whether the text encoder stays while the transformer works.
    pub keeps_text_encoder: bool,
    /// Whether the transformer stays while the VAE works.
    pub keeps_transformer: bool,
}

impl MemoryPlan {
    /// The plan that streams least within `max_vram` bytes, or without a limit.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is none.
    pub fn new(shapes: &Shapes<'_>, residency: Residency, max_vram: Option<u64>) -> Result<Self> {
        let limit = max_vram.unwrap_or(u64::MAX);
        let text = TextCosts::new(shapes);
        let blocks = BlockCosts::new(shapes);
        let (vae, banded) = (vae_stage(shapes, false), vae_stage(shapes, true));
        let fits = |bytes: u64| bytes.saturating_add(OVERHEAD) <= limit;
        // The VAE is small and stays once it is there.
        let beside_vae = |bytes: u64| fits(bytes.saturating_add(vae.weights));

        let whole_text = text.stage(0);
        let whole = blocks.stage(StreamedBlocks::default());
        let together = whole_text.weights + whole.weights + vae.weights;
        let busiest = whole_text.activations.max(whole.activations).max(vae.activations);
        let keeps_text_encoder = residency == Residency::Stay && fits(together.saturating_add(busiest));

        let layers = text.layers;
        let streamed_layers = (0..=layers).find(|&streamed| beside_vae(text.stage(streamed).total()));
        let Some(streamed_layers) = streamed_layers else {
            return Err(too_small("the text encoder", text.stage(layers), limit, "a limit above that is needed"));
        };
        let kept = if keeps_text_encoder { whole_text.weights } else { 0 };
        let candidates = blocks.candidates();
        let found =
            candidates.iter().find(|&&streamed| beside_vae(blocks.stage(streamed).total().saturating_add(kept)));
        let Some(&streamed_blocks) = found else {
            let least = candidates.last().map_or(whole, |&all| blocks.stage(all));
            return Err(too_small("the transformer", least, limit, "a smaller picture takes less"));
        };
        let transformer = blocks.stage(streamed_blocks);
        let beside = transformer.weights.saturating_add(kept);
        // Bands take a little longer than the whole; to load the transformer again takes much longer.
        let ways = [(beside, vae, false), (beside, banded, true), (0, vae, false), (0, banded, true)];
        let found = ways.into_iter().find(|(beside, vae, _)| fits(vae.total().saturating_add(*beside)));
        let Some((beside, vae, vae_in_bands)) = found else {
            return Err(too_small("the vae", banded, limit, "a smaller picture takes less"));
        };
        let keeps_transformer = beside > 0;
        Ok(Self {
            text_encoder: text.stage(streamed_layers),
            streamed_layers,
            transformer,
            streamed_blocks,
            vae,
            vae_in_bands,
            keeps_text_encoder: keeps_text_encoder && keeps_transformer,
            keeps_transformer,
        })
    }

    /// The most that tensors, the driver and the libraries take at a time, in bytes.
    pub fn peak(&self) -> u64 {
        let kept_text = if self.keeps_text_encoder { self.text_encoder.weights } else { 0 };
        let kept = if self.keeps_transformer { self.transformer.weights } else { 0 };
        let stages = [
            self.text_encoder.total().saturating_add(self.vae.weights),
            self.transformer.total().saturating_add(kept_text).saturating_add(self.vae.weights),
            self.vae.total().saturating_add(kept).saturating_add(kept_text),
        ];
        stages.into_iter().max().unwrap_or(0).saturating_add(OVERHEAD)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let stage = |f: &mut fmt::Formatter<'_>, name: &str, stage: Stage, streamed: String| {
            write!(f, "{name} {} + {} MiB{streamed}, ", mib(stage.weights), mib(stage.activations))
        };
        let of =
            |count: usize, what: &str| if count == 0 { String::new() } else { format!(" ({count} {what} streamed)") };
        let StreamedBlocks { double, single } = self.streamed_blocks;
        stage(f, "text encoder", self.text_encoder, of(self.streamed_layers, "layers"))?;
        stage(f, "transformer", self.transformer, of(double + single, "blocks"))?;
        stage(f, "vae", self.vae, if self.vae_in_bands { " (in bands)".to_owned() } else { String::new() })?;
        let kept = match (self.keeps_text_encoder, self.keeps_transformer) {
            (true, _) => "all stay",
            (false, true) => "the text encoder makes room",
            (false, false) => "each makes room for the next",
        };
        write!(f, "{kept}; at most {} MiB at a time", mib(self.peak()))
    }
}

fn too_small(what: &'static str, stage: Stage, max_vram: u64, hint: &'static str) -> Error {
    Error::Memory { what, needed: stage.total().saturating_add(OVERHEAD), max_vram, hint }
}

fn bytes(elements: usize, dtype: DType) -> u64 {
    elements as u64 * dtype.size_in_bytes() as u64
}

struct TextCosts {
    layers: usize,
    layer: u64,
    slot: u64,
    activations: u64,
}

impl TextCosts {
    fn new(shapes: &Shapes<'_>) -> Self {
        let config = shapes.text_encoder;
        let list = layer_expected(config);
        let elements = list.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        // Residual stream, its norm, the sum; gate and up with their product; queries before and behind their rotation.
        let heads = config.num_attention_heads * config.head_dim;
        let widths = 4 * config.hidden_size + 3 * config.intermediate_size + 3 * heads;
        let taps = shapes.out_layers.len() * config.hidden_size;
        Self {
            layers: highest(shapes.out_layers),
            layer: bytes(elements, shapes.dtype),
            slot: bytes(BlockLayout::new(&list).elements(), shapes.dtype),
            activations: bytes(shapes.text_tokens * (widths + 2 * taps), shapes.dtype) + SCRATCH / 4,
        }
    }

    fn stage(&self, streamed: usize) -> Stage {
        let slots = if streamed > 0 { SLOTS * self.slot } else { 0 };
        Stage { weights: (self.layers - streamed) as u64 * self.layer + slots, activations: self.activations }
    }
}

struct BlockCosts {
    others: u64,
    double: u64,
    single: u64,
    double_slot: u64,
    single_slot: u64,
    counts: StreamedBlocks,
    activations: u64,
}

impl BlockCosts {
    fn new(shapes: &Shapes<'_>) -> Self {
        let (config, dtype) = (shapes.transformer, shapes.dtype);
        let widths = Widths::new(config);
        let elements = |list: &[weights::Expected]| list.iter().map(|t| t.shape.iter().product::<usize>()).sum();
        let kind = |expected: fn(&Widths, &str, &mut Vec<weights::Expected>)| {
            let mut list = Vec::new();
            expected(&widths, "", &mut list);
            (bytes(elements(&list), dtype), bytes(BlockLayout::new(&list).elements(), dtype))
        };
        let (double, double_slot) = kind(DoubleBlock::expected);
        let (single, single_slot) = kind(SingleBlock::expected);
        let counts = StreamedBlocks { double: config.num_layers, single: config.num_single_layers };
        let all = bytes(elements(&Flux2Transformer::expected(config)), dtype);
        let others = all - counts.double as u64 * double - counts.single as u64 * single;

        let factor = shapes.vae.packed_factor();
        let tokens = shapes.text_tokens + (shapes.height / factor) * (shapes.width / factor);
        // A single block holds its input, the fused projection, both branches side by side, query and key.
        let Widths { hidden: h, mlp, .. } = widths;
        let step = bytes(tokens * (8 * h + 3 * mlp), dtype) + SCRATCH;
        // The largest matrix of the modulations is widened to f32 before the first step.
        let modulations = bytes(6 * h * h, DType::F32);
        let activations = step.max(modulations);
        Self { others, double, single, double_slot, single_slot, counts, activations }
    }

    fn stage(&self, streamed: StreamedBlocks) -> Stage {
        let stay = |count: usize, streamed: usize, each: u64| (count - streamed) as u64 * each;
        let slot = |streamed: usize, slot: u64| if streamed > 0 { slot } else { 0 };
        let slot = slot(streamed.double, self.double_slot).max(slot(streamed.single, self.single_slot));
        let weights = self.others
            + stay(self.counts.double, streamed.double, self.double)
            + stay(self.counts.single, streamed.single, self.single)
            + SLOTS * slot;
        Stage { weights, activations: self.activations }
    }

    /// From the one that streams nothing on: single blocks first, whose slots are smaller.
    fn candidates(&self) -> Vec<StreamedBlocks> {
        let singles = (0..=self.counts.single).map(|single| StreamedBlocks { double: 0, single });
        let doubles = (1..=self.counts.double).map(|double| StreamedBlocks { double, single: self.counts.single });
        singles.chain(doubles).collect()
    }
}

fn vae_stage(shapes: &Shapes<'_>, in_bands: bool) -> Stage {
    let (config, dtype) = (shapes.vae, shapes.dtype);
    let elements = Flux2Vae::expected(config).iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let widths = config.decoder_block_out_channels();
    let pixels = shapes.height * shapes.width;
    // A residual block holds its input, the normed input and what becomes of it; the first of a level has the width of the
    // level before, which is doubled in place of them: as wide twice over and a quarter.
    // In bands that first block holds its smaller input beside two tensors of its own width, or beside its input as a whole.
    let hungriest = widths.iter().enumerate().map(|(level, &own)| {
        let coarser = widths.get(level + 1).copied();
        let (own, before) = (own.max(8), coarser.unwrap_or(own).max(8));
        let block = match coarser {
            Some(_) if in_bands => before / 4 + before.max(2 * own),
            _ => 2 * before + own + own.max(before) / 4,
        };
        (block * pixels) >> (2 * level)
    });
    let bands = if in_bands { (Bands::TENSORS * Bands::BYTES) as u64 } else { 0 };
    let activations = bytes(hungriest.max().unwrap_or(0), dtype) + SCRATCH + bands;
    Stage { weights: bytes(elements, dtype), activations }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn klein<R>(side: usize, f: impl FnOnce(&Shapes<'_>) -> R) -> R {
        let read = |path: &str| std::fs::read(crate::testing::path(&format!("models/configs/klein-4b/{path}")));
        let json = |path: &str| read(path).expect("a config");
        let text_encoder = serde_json::from_slice(&json("text_encoder/config.json")).expect("a config");
        let transformer = serde_json::from_slice(&json("transformer/config.json")).expect("a config");
        let vae = serde_json::from_slice(&json("vae/config.json")).expect("a config");
        f(&Shapes {
            text_encoder: &text_encoder,
            out_layers: &[9, 18, 27],
            transformer: &transformer,
            vae: &vae,
            dtype: DType::BF16,
            text_tokens: 512,
            height: side,
            width: side,
        })
    }

    #[test]
    fn weights_are_those_of_the_published_model() {
        let plan = klein(1024, |shapes| MemoryPlan::new(shapes, Residency::Release, None)).unwrap();
        assert_eq!(plan.transformer.weights, 7_751_089_152);
        // 27 layers of 5.450 GB; the embedding stays on the host.
        assert!((5.44e9..5.46e9).contains(&(plan.text_encoder.weights as f64)), "{plan:?}");
        assert_eq!((plan.streamed_layers, plan.streamed_blocks), (0, StreamedBlocks::default()));
        assert!(!plan.keeps_text_encoder && plan.keeps_transformer);
        assert!(plan.peak() < 13_000_000_000, "{plan}");
        let stay = klein(1024, |shapes| MemoryPlan::new(shapes, Residency::Stay, None)).unwrap();
        assert!(stay.keeps_text_encoder && stay.peak() > plan.peak() + 5_000_000_000, "{stay}");
    }

    #[test]
    fn plans_keep_their_limit_and_stream_no_more_than_they_must() {
        let mut last = StreamedBlocks { double: usize::MAX, single: usize::MAX };
        for gib in [4u64, 6, 8, 10, 12, 16, 24] {
            let plan = klein(1024, |shapes| MemoryPlan::new(shapes, Residency::Stay, Some(gib << 30))).unwrap();
            assert!(plan.peak() <= gib << 30, "{gib} GiB: {plan}");
            let streamed = plan.streamed_blocks;
            assert!(streamed.single <= last.single && streamed.double <= last.double, "{gib} GiB: {plan}");
            assert_eq!(streamed.single > 0, gib < 9, "{gib} GiB: {plan}");
            if streamed.single > 0 && streamed.double == 0 {
                // 13 h^2 and two norms each; two places for those that come and go.
                let block = 2 * (13 * 3072 * 3072 + 2 * 128);
                let away = streamed.single as u64 * block;
                assert_eq!(plan.transformer.weights, 7_751_089_152 - away + 2 * block, "{gib} GiB: {plan}");
            }
            last = streamed;
        }
    }

    #[test]
    fn what_cannot_be_done_says_what_it_would_take() {
        let error = klein(1024, |shapes| MemoryPlan::new(shapes, Residency::Release, Some(1 << 30))).unwrap_err();
        assert!(matches!(error, Error::Memory { needed, .. } if needed > 1 << 30), "{error}");
        let large = klein(4096, |shapes| MemoryPlan::new(shapes, Residency::Release, Some(8 << 30))).unwrap_err();
        assert!(large.to_string().contains("a smaller picture"), "{large}");
    }

    /// Bands of a picture of 4096x4096 fit a card of 16 GB, and where they let the transformer stay they are taken.
    #[test]
    fn large_pictures_are_decoded_in_bands() {
        let plan = |side, gb: u64| klein(side, |s| MemoryPlan::new(s, Residency::Release, Some(gb * 1_000_000_000)));
        let large = plan(4096, 16).unwrap();
        assert!(large.vae_in_bands && !large.keeps_transformer && large.vae.total() < 12_000_000_000, "{large}");
        assert!(large.to_string().contains("in bands"), "{large}");
        let middling = plan(2048, 12).unwrap();
        assert!(middling.vae_in_bands && middling.keeps_transformer, "{middling}");
        let roomy = plan(2048, 24).unwrap();
        assert!(!roomy.vae_in_bands && roomy.vae.total() > 2 * middling.vae.total() - (1 << 30), "{roomy}");
    }

    #[test]
    fn a_plan_is_a_line() {
        let plan = klein(512, |shapes| MemoryPlan::new(shapes, Residency::Release, Some(6 << 30))).unwrap().to_string();
        assert!(!plan.contains('\n') && plan.contains("blocks streamed") && plan.contains("text encoder"), "{plan}");
    }
}
