//! The tensors that a network needs, under their diffusers names.

use weights::Expected;

use crate::architecture::{Architecture, Network, Resample};

/// Name and shape of every tensor of `architecture`, in the diffusers layout.
pub fn expected(architecture: &Architecture) -> Vec<Expected> {
    let mut plan = Plan { list: Vec::new(), kernel: architecture.temporal_kernel };
    let z = architecture.z_dim;
    if let Some(encoder) = &architecture.encoder {
        plan.network("encoder", encoder, architecture.residual, Names::encoder);
        plan.conv("quant_conv", 2 * z, 2 * z, &[1, 1, 1]);
    }
    if let Some(decoder) = &architecture.decoder {
        plan.conv("post_quant_conv", z, z, &[1, 1, 1]);
        plan.network("decoder", decoder, architecture.residual, Names::decoder);
    }
    plan.list
}

/// Where the parts of a stage lie.
pub(crate) struct Names {
    /// Prefix of each residual block.
    pub(crate) blocks: Vec<String>,
    /// Prefix of the resampler, whether or not there is one.
    pub(crate) resample: String,
}

impl Names {
    /// Names of each encoder stage. Flat networks count all blocks and resamplers in one list.
    pub(crate) fn encoder(network: &Network, residual: bool) -> Vec<Self> {
        let mut flat = 0;
        let mut names = Vec::new();
        for (s, stage) in network.stages.iter().enumerate() {
            let prefix = "encoder.down_blocks";
            let count = stage.blocks.len();
            names.push(if residual {
                Self {
                    blocks: (0..count).map(|j| format!("{prefix}.{s}.resnets.{j}")).collect(),
                    resample: format!("{prefix}.{s}.downsampler"),
                }
            } else {
                Self {
                    blocks: (0..count).map(|j| format!("{prefix}.{}", flat + j)).collect(),
                    resample: format!("{prefix}.{}", flat + count),
                }
            });
            flat += count + 1;
        }
        names
    }

    /// Names of each decoder stage.
    pub(crate) fn decoder(network: &Network, residual: bool) -> Vec<Self> {
        let up = if residual { "upsampler" } else { "upsamplers.0" };
        let stage = |(s, stage): (usize, &crate::architecture::Stage)| {
            let prefix = format!("decoder.up_blocks.{s}");
            Self {
                blocks: (0..stage.blocks.len()).map(|j| format!("{prefix}.resnets.{j}")).collect(),
                resample: format!("{prefix}.{up}"),
            }
        };
        network.stages.iter().enumerate().map(stage).collect()
    }
}

struct Plan {
    list: Vec<Expected>,
    kernel: usize,
}

impl Plan {
    fn conv(&mut self, prefix: &str, output: usize, input: usize, kernel: &[usize]) {
        let shape = [&[output, input], kernel].concat();
        self.list.push(Expected::new(format!("{prefix}.weight"), shape));
        self.list.push(Expected::new(format!("{prefix}.bias"), [output]));
    }

    /// A gamma with the axes of a video (3) or a picture (2).
    fn norm(&mut self, prefix: &str, channels: usize, axes: usize) {
        let mut shape = vec![1; axes + 1];
        shape[0] = channels;
        self.list.push(Expected::new(format!("{prefix}.gamma"), shape));
    }

    fn block(&mut self, prefix: &str, input: usize, output: usize, shortcut: bool) {
        let kernel = [self.kernel, 3, 3];
        self.norm(&format!("{prefix}.norm1"), input, 3);
        self.conv(&format!("{prefix}.conv1"), output, input, &kernel);
        self.norm(&format!("{prefix}.norm2"), output, 3);
        self.conv(&format!("{prefix}.conv2"), output, output, &kernel);
        if shortcut {
            self.conv(&format!("{prefix}.conv_shortcut"), output, input, &[1, 1, 1]);
        }
    }

    fn middle(&mut self, part: &str, channels: usize) {
        let attention = format!("{part}.mid_block.attentions.0");
        self.block(&format!("{part}.mid_block.resnets.0"), channels, channels, false);
        self.norm(&format!("{attention}.norm"), channels, 2);
        self.conv(&format!("{attention}.to_qkv"), 3 * channels, channels, &[1, 1]);
        self.conv(&format!("{attention}.proj"), channels, channels, &[1, 1]);
        self.block(&format!("{part}.mid_block.resnets.1"), channels, channels, false);
    }

    fn network(&mut self, part: &str, network: &Network, residual: bool, names: fn(&Network, bool) -> Vec<Names>) {
        let kernel = [self.kernel, 3, 3];
        let widths = network.widths();
        self.conv(&format!("{part}.conv_in"), network.base, network.in_channels, &kernel);
        let last = widths[widths.len() - 1];
        self.middle(part, if part == "encoder" { last } else { network.base });
        for (stage, names) in network.stages.iter().zip(names(network, residual)) {
            for (block, name) in stage.blocks.iter().zip(&names.blocks) {
                self.block(name, block.input, block.output, block.shortcut);
            }
            if let Some(Resample { input, output, temporal }) = stage.resample {
                self.conv(&format!("{}.resample.1", names.resample), output, input, &[3, 3]);
                if temporal {
                    let wide = if part == "decoder" { 2 * input } else { output };
                    let narrow = if part == "decoder" { input } else { output };
                    self.conv(&format!("{}.time_conv", names.resample), wide, narrow, &[3, 1, 1]);
                }
            }
        }
        self.norm(&format!("{part}.norm_out"), last, 3);
        self.conv(&format!("{part}.conv_out"), network.out_channels, last, &kernel);
    }
}
