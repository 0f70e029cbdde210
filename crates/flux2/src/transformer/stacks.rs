//! The blocks of the transformer one after another, on the device or streamed to it.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_fork::What;
use weights::{Loader, TensorSource};

use super::{
    DoubleBlock, Flux2Transformer, Prepared, SingleBlock, Widths,
    attention::Joined,
    embed::StepModulations,
    names::{double_block, single_block},
};
use crate::{
    config::TransformerConfig,
    error::Result,
    options::LoadOptions,
    streaming::{BlockLayout, Blocks, Streamer, begin, is_streamed},
};

/// How many blocks of each kind stay on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamedBlocks {
    /// Of the double blocks.
    pub double: usize,
    /// Of the single blocks.
    pub single: usize,
}

/// All blocks.
#[derive(Debug)]
pub(super) struct Stacks {
    double: Blocks<DoubleBlock>,
    single: Blocks<SingleBlock>,
    streamer: Option<Arc<Streamer>>,
    streamed: StreamedBlocks,
}

impl Stacks {
    /// Takes the blocks from `loader`, those that are streamed from `source`.
    pub(super) fn load(
        loader: &mut Loader,
        source: Arc<dyn TensorSource>,
        config: &TransformerConfig,
        options: &LoadOptions,
        streamed: StreamedBlocks,
    ) -> Result<Self> {
        let widths = Widths::new(config);
        let (doubles, singles) = (config.num_layers, config.num_single_layers);
        let streamed = StreamedBlocks { double: streamed.double.min(doubles), single: streamed.single.min(singles) };
        if streamed == StreamedBlocks::default() {
            let double = (0..doubles).map(|i| DoubleBlock::load(loader, &widths, &double_block(i)));
            let double = Blocks::resident(double.collect::<Result<_>>()?);
            let single = (0..singles).map(|i| SingleBlock::load(loader, &widths, &single_block(i)));
            let single = Blocks::resident(single.collect::<Result<_>>()?);
            return Ok(Self { double, single, streamer: None, streamed });
        }

        let mut list = Vec::new();
        DoubleBlock::expected(&widths, "", &mut list);
        let double_layout = BlockLayout::new(&list);
        list.clear();
        SingleBlock::expected(&widths, "", &mut list);
        let single_layout = BlockLayout::new(&list);
        let elements = |count: usize, layout: &BlockLayout| if count > 0 { layout.elements() } else { 0 };
        let elements = elements(streamed.double, &double_layout).max(elements(streamed.single, &single_layout));
        let mut streamer = Streamer::new(elements, options.dtype, &options.device)?;
        let on_host = LoadOptions { device: Device::Cpu, ..options.clone() };
        let mut host_loader = on_host.loader(source, &Flux2Transformer::expected(config), |_| false)?;

        let mut double = Blocks::empty();
        if streamed.double > 0 {
            let slots = streamer.blocks(&double_layout, |parts| DoubleBlock::from_parts(parts, &widths, ""))?;
            double = Blocks::streamed(slots);
        }
        for i in 0..doubles {
            double.push(if is_streamed(i, doubles, streamed.double) {
                streamer.push(&mut host_loader, &double_block(i), &double_layout)?;
                None
            } else {
                Some(DoubleBlock::load(loader, &widths, &double_block(i))?)
            });
        }
        let mut single = Blocks::empty();
        if streamed.single > 0 {
            let slots = streamer.blocks(&single_layout, |parts| SingleBlock::from_parts(parts, &widths, ""))?;
            single = Blocks::streamed(slots);
        }
        for i in 0..singles {
            single.push(if is_streamed(i, singles, streamed.single) {
                streamer.push(&mut host_loader, &single_block(i), &single_layout)?;
                None
            } else {
                Some(SingleBlock::load(loader, &widths, &single_block(i))?)
            });
        }
        Ok(Self { double, single, streamer: Some(Arc::new(streamer)), streamed })
    }

    pub(super) fn streamed(&self) -> StreamedBlocks {
        self.streamed
    }

    /// Number of blocks.
    pub(super) fn len(&self) -> usize {
        self.double.len() + self.single.len()
    }

    /// The tokens of the picture, `[B, N, h]`, of the image stream `[B, N + R, h]`. Calls `done` after every block.
    pub(super) fn forward(
        &self,
        mut image: Tensor,
        modulations: &StepModulations,
        prepared: &Prepared,
        done: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Tensor> {
        let StepModulations { double, single, .. } = modulations;
        let rope = &prepared.rope;
        let mut text = prepared.text.clone();
        let mut pass = begin(&self.streamer)?;
        let mut buffer: Option<Tensor> = None;
        for index in 0..self.double.len() {
            (image, text) = self.double.with(index, &mut pass, |block| {
                let qkv = match &buffer {
                    Some(qkv) => qkv.clone(),
                    None => buffer.insert(block.buffer(&image, &text)?).clone(),
                };
                block.forward_in(&qkv, &image, &text, double, rope)
            })?;
            done()?;
        }
        drop(buffer);
        let Some(last) = self.single.len().checked_sub(1) else {
            return Ok(image.narrow(1, 0, prepared.image_tokens).what("tokens of the picture")?);
        };
        let mut x = Tensor::cat(&[text, image], 1).what("text and image streams")?;
        let mut buffer: Option<Joined> = None;
        for index in 0..last {
            x = self.single.with(index, &mut pass, |block| {
                let joined = match &buffer {
                    Some(joined) => joined.clone(),
                    None => buffer.insert(block.joined(&x, None)?).clone(),
                };
                block.forward_in(&joined, &x, single, rope)
            })?;
            done()?;
        }
        drop(buffer);
        x = self.single.with(last, &mut pass, |block| block.forward_part(&x, &prepared.image(), single, rope))?;
        done()?;
        Ok(x)
    }
}
