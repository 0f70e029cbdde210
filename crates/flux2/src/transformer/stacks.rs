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
    streaming::{BlockLayout, Blocks, HostBlocks, Streamer, begin, is_streamed},
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
    widths: Widths,
}

impl Stacks {
    /// Takes the blocks from `loader`, those that are streamed from `kept` or `source`.
    pub(super) fn load(
        loader: &mut Loader,
        source: Arc<dyn TensorSource>,
        config: &TransformerConfig,
        options: &LoadOptions,
        streamed: StreamedBlocks,
        kept: &HostBlocks,
    ) -> Result<Self> {
        let widths = Widths::new(config);
        let (doubles, singles) = (config.num_layers, config.num_single_layers);
        let streamed = StreamedBlocks { double: streamed.double.min(doubles), single: streamed.single.min(singles) };
        if streamed == StreamedBlocks::default() {
            let double = (0..doubles).map(|i| DoubleBlock::load(loader, &widths, &double_block(i)));
            let double = Blocks::resident(double.collect::<Result<_>>()?);
            let single = (0..singles).map(|i| SingleBlock::load(loader, &widths, &single_block(i)));
            let single = Blocks::resident(single.collect::<Result<_>>()?);
            return Ok(Self { double, single, streamer: None, streamed, widths });
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
                streamer.push(kept, &mut host_loader, &double_block(i), &double_layout)?;
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
                streamer.push(kept, &mut host_loader, &single_block(i), &single_layout)?;
                None
            } else {
                Some(SingleBlock::load(loader, &widths, &single_block(i))?)
            });
        }
        Ok(Self { double, single, streamer: Some(Arc::new(streamer)), streamed, widths })
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
        let eps = self.widths.eps;
        if let Some(last) = self.double.len().checked_sub(1) {
            let qkv = DoubleBlock::buffer(&image, &text)?;
            let mut ready = double.ready(image, text, eps)?;
            for index in 0..last {
                ready = self.double.with(index, &mut pass, |block| block.forward_ready(&qkv, ready, double, rope))?;
                done()?;
            }
            (image, text) = self.double.with(last, &mut pass, |block| block.forward_in(&qkv, ready, double, rope))?;
            done()?;
        }
        let Some(last) = self.single.len().checked_sub(1) else {
            return Ok(image.narrow(1, 0, prepared.image_tokens).what("tokens of the picture")?);
        };
        let x = Tensor::cat(&[text, image], 1).what("text and image streams")?;
        let joined = if last > 0 { Some(Joined::new(&x, None, &self.widths)?) } else { None };
        let mut ready = single.ready(x, eps)?;
        if let Some(joined) = joined {
            for index in 0..last {
                ready =
                    self.single.with(index, &mut pass, |block| block.forward_ready(&joined, ready, single, rope))?;
                done()?;
            }
        }
        let x =
            self.single.with(last, &mut pass, |block| block.forward_part(ready, &prepared.image(), single, rope))?;
        done()?;
        Ok(x)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::{plan::random, testing::relative_l2, transformer::small_config};

    /// Blocks hand their results on already normed for the next.
    #[test]
    fn a_pass_is_its_blocks_one_behind_the_other() {
        let mut config = small_config(3, 3, 2, 20, 14);
        config.axes_dims_rope = vec![2, 4, 6, 8];
        let source = random::file(&random::tensors(&Flux2Transformer::expected(&config)));
        let options = LoadOptions::new(Device::Cpu, DType::F32);
        let model = Flux2Transformer::load(&config, source, &options).unwrap();
        let prepared = model.prepare(&random::tensor(1, 1.0, &[2, 5, 14]), (3, 4)).unwrap();
        let modulations = model.modulations(&[0.7], None, 2).unwrap();
        let image = random::tensor(2, 1.0, &[2, 12, 40]);
        let mut blocks = 0;
        let mut done = || {
            blocks += 1;
            Ok(())
        };
        let got = model.stacks.forward(image.clone(), &modulations[0], &prepared, &mut done).unwrap();
        assert_eq!(blocks, 6);

        let StepModulations { double, single, .. } = &modulations[0];
        let (mut image, mut text) = (image, prepared.text.clone());
        for index in 0..3 {
            let run = |block: &DoubleBlock| block.forward(&image, &text, double, &prepared.rope);
            (image, text) = model.stacks.double.with(index, &mut None, run).unwrap();
        }
        let mut x = Tensor::cat(&[text, image], 1).unwrap();
        for index in 0..3 {
            let run = |block: &SingleBlock| block.forward(&x, single, &prepared.rope);
            x = model.stacks.single.with(index, &mut None, run).unwrap();
        }
        let error = relative_l2(&got, &x.narrow(1, 5, 12).unwrap());
        assert!(error < 1e-6, "{error:e}");
    }
}
