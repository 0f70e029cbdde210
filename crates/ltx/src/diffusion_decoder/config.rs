//! Configuration of the diffusion decoder: the block in a published file, or `config.json` of diffusers.

use serde::Deserialize;
use serde_json::Value;
use weights::TensorSource;

use crate::{
    error::{Error, Result},
    files::{embedded, no_config},
};

/// What the network predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub enum OutputType {
    /// The pixels.
    #[serde(rename = "x0")]
    X0,
    /// The velocity of the flow from pixels to noise.
    #[serde(rename = "v")]
    V,
}

/// Architecture of an LTX-2.5 diffusion decoder.
///
/// The number of stages is that of the tables: all but the last are deterministic and each ends in an upsample; the last
/// one denoises. The last channel count and depth are those of the denoising stage.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DiffusionDecoderConfig {
    /// Channels of the latents.
    pub in_channels: usize,
    /// Channels of the pixels.
    pub out_channels: usize,
    /// Side of the square of pixels in one token.
    pub patch_size: usize,
    /// Channels of an attention head.
    pub head_dim: usize,
    /// Width of each stage.
    pub stage_channels: Vec<usize>,
    /// Blocks of each stage.
    pub stage_depths: Vec<usize>,
    /// Attention window (T, H, W) of each deterministic stage, in tokens.
    pub stage_kernels: Vec<[usize; 3]>,
    /// Factors (T, H, W) of the upsample behind each deterministic stage.
    pub upsample_strides: Vec<[usize; 3]>,
    /// What each upsample divides the width by.
    pub upsample_channel_reductions: Vec<usize>,
    /// Attention window of the denoising stage.
    pub stage5_kernel: [usize; 3],
    /// Width of the embedding of the timestep.
    pub t_emb_dim: usize,
    /// What timesteps in 0..=1 are multiplied by before they are embedded.
    pub timestep_scale_multiplier: f64,
    /// What the network predicts.
    pub model_output_type: OutputType,
    /// Steps that the weights are made for.
    pub num_inference_steps: usize,
}

/// `config.vae` of a published file.
#[derive(Deserialize)]
struct Embedded {
    model_output_type: OutputType,
    decoder: EmbeddedDecoder,
}

#[derive(Deserialize)]
struct EmbeddedDecoder {
    in_channels: usize,
    out_channels: usize,
    patch_size: usize,
    #[serde(alias = "na_head_dim")]
    head_dim: usize,
    stage_channels: Vec<usize>,
    stage_depths: Vec<usize>,
    stage_kernels: Vec<[usize; 3]>,
    upsamples: Vec<([usize; 3], usize)>,
    stage5_kernel: [usize; 3],
    timestep_scale_multiplier: f64,
    default_num_inference_steps: usize,
    /// Absent from the published file.
    #[serde(default = "t_emb_dim")]
    t_emb_dim: usize,
}

fn t_emb_dim() -> usize {
    384
}

/// `config.json` of `LTX2VideoDiffusionDecoderModel`.
#[derive(Deserialize)]
struct Diffusers {
    latent_channels: usize,
    out_channels: usize,
    patch_size: usize,
    decoder_head_dim: usize,
    decoder_stage_channels: Vec<usize>,
    decoder_stage_depths: Vec<usize>,
    decoder_stage_kernels: Vec<[usize; 3]>,
    decoder_upsample_strides: Vec<[usize; 3]>,
    decoder_upsample_channel_reductions: Vec<usize>,
    decoder_stage5_kernel: [usize; 3],
    decoder_t_emb_dim: usize,
    decoder_timestep_scale_multiplier: f64,
    decoder_model_output_type: OutputType,
    decoder_num_inference_steps: usize,
}

const EMBEDDED_CLASS: &str = "NADiffusionDecoder";
const DIFFUSERS_CLASS: &str = "LTX2VideoDiffusionDecoderModel";

impl DiffusionDecoderConfig {
    /// Reads either form: the JSON of the metadata key `config` of a published file (with `vae` inside), or diffusers'
    /// `config.json`. Nothing that shapes the result has a default, but for `t_emb_dim`, which the published file leaves
    /// out.
    ///
    /// # Errors
    /// [`Error::Config`] if it is that of another model, a key is missing or has another type, or the values describe no
    /// network ([`Self::validate`]).
    pub fn from_json(json: &Value) -> Result<Self> {
        let config = match json.get("vae") {
            Some(vae) => Self::embedded(vae)?,
            None => Self::diffusers(json)?,
        };
        config.validate()?;
        Ok(config)
    }

    /// Reads what a file carries under the metadata key `config`.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn from_source(source: &dyn TensorSource) -> Result<Self> {
        Self::of(source, None)
    }

    /// Reads what a file carries under the metadata key `config`, or else the configuration `beside` it.
    ///
    /// # Errors
    /// [`Error::NoConfig`] if there is neither: the shapes do not say what the network predicts. As [`Self::from_json`].
    pub fn of(source: &dyn TensorSource, beside: Option<&Value>) -> Result<Self> {
        match embedded(source)? {
            Some(config) => Self::from_json(&config),
            None => Self::from_json(beside.ok_or_else(|| no_config(source))?),
        }
    }

    fn embedded(vae: &Value) -> Result<Self> {
        let class = vae.pointer("/decoder/_class_name").and_then(Value::as_str);
        if class != Some(EMBEDDED_CLASS) {
            let found = class.map_or("missing".to_owned(), |class| format!("{class:?}"));
            return invalid("vae.decoder._class_name", format!("is {found}, expected {EMBEDDED_CLASS:?}"));
        }
        let Embedded { model_output_type, decoder } = parse("vae", vae)?;
        let deterministic = decoder.stage_channels.len().saturating_sub(1);
        let mut stage_kernels = decoder.stage_kernels;
        if stage_kernels.len() == deterministic + 1 && stage_kernels.last() != Some(&decoder.stage5_kernel) {
            return invalid("vae.decoder.stage_kernels", format!("{stage_kernels:?} do not end in stage5_kernel"));
        }
        stage_kernels.truncate(deterministic);
        let (upsample_strides, upsample_channel_reductions) = decoder.upsamples.into_iter().unzip();
        Ok(Self {
            in_channels: decoder.in_channels,
            out_channels: decoder.out_channels,
            patch_size: decoder.patch_size,
            head_dim: decoder.head_dim,
            stage_channels: decoder.stage_channels,
            stage_depths: decoder.stage_depths,
            stage_kernels,
            upsample_strides,
            upsample_channel_reductions,
            stage5_kernel: decoder.stage5_kernel,
            t_emb_dim: decoder.t_emb_dim,
            timestep_scale_multiplier: decoder.timestep_scale_multiplier,
            model_output_type,
            num_inference_steps: decoder.default_num_inference_steps,
        })
    }

    fn diffusers(json: &Value) -> Result<Self> {
        let class = json.get("_class_name").and_then(Value::as_str);
        if let Some(class) = class.filter(|class| *class != DIFFUSERS_CLASS) {
            return invalid("_class_name", format!("is {class:?}, expected {DIFFUSERS_CLASS:?}"));
        }
        let file: Diffusers = parse("config", json)?;
        Ok(Self {
            in_channels: file.latent_channels,
            out_channels: file.out_channels,
            patch_size: file.patch_size,
            head_dim: file.decoder_head_dim,
            stage_channels: file.decoder_stage_channels,
            stage_depths: file.decoder_stage_depths,
            stage_kernels: file.decoder_stage_kernels,
            upsample_strides: file.decoder_upsample_strides,
            upsample_channel_reductions: file.decoder_upsample_channel_reductions,
            stage5_kernel: file.decoder_stage5_kernel,
            t_emb_dim: file.decoder_t_emb_dim,
            timestep_scale_multiplier: file.decoder_timestep_scale_multiplier,
            model_output_type: file.decoder_model_output_type,
            num_inference_steps: file.decoder_num_inference_steps,
        })
    }

    /// Checks that the values describe a network, and bounds what a damaged file can make us allocate.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that does not fit.
    pub fn validate(&self) -> Result<()> {
        let stages = self.stage_channels.len();
        if !(2..=16).contains(&stages) {
            return invalid("stage_channels", format!("has {stages} entries, expected 2 to 16"));
        }
        for (field, len, expected) in [
            ("stage_depths", self.stage_depths.len(), stages),
            ("stage_kernels", self.stage_kernels.len(), stages - 1),
            ("upsample_strides", self.upsample_strides.len(), stages - 1),
            ("upsample_channel_reductions", self.upsample_channel_reductions.len(), stages - 1),
        ] {
            if len != expected {
                return invalid(field, format!("has {len} entries, expected {expected}"));
            }
        }
        let single = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("patch_size", self.patch_size),
            ("t_emb_dim", self.t_emb_dim),
            ("num_inference_steps", self.num_inference_steps),
        ];
        let counts = single.into_iter().chain(self.stage_channels.iter().map(|&c| ("stage_channels", c)));
        for (field, value) in counts {
            if value == 0 || value > 1 << 16 {
                return invalid(field, format!("is {value}, expected 1 to 65536"));
            }
        }
        if self.head_dim == 0 || self.head_dim > 128 || !self.head_dim.is_multiple_of(8) {
            return invalid("head_dim", format!("is {}, expected a multiple of 8 up to 128", self.head_dim));
        }
        if let Some(channels) = self.stage_channels.iter().find(|c| !c.is_multiple_of(self.head_dim)) {
            return invalid("stage_channels", format!("{channels} are no multiple of head_dim ({})", self.head_dim));
        }
        if let Some(depth) = self.stage_depths.iter().find(|&&depth| depth == 0 || depth > 1024) {
            return invalid("stage_depths", format!("{depth} is not possible, expected 1 to 1024"));
        }
        for kernel in self.stage_kernels.iter().chain([&self.stage5_kernel]) {
            if kernel.iter().any(|k| k.is_multiple_of(2) || *k > 1 << 10) {
                return invalid(
                    "stage_kernels",
                    format!("{kernel:?} is not possible, expected odd windows up to 1023"),
                );
            }
        }
        for (stage, stride) in self.upsample_strides.iter().enumerate() {
            if stride.iter().any(|s| !(1..=2).contains(s)) {
                return invalid("upsample_strides", format!("{stride:?} is not possible, expected factors 1 or 2"));
            }
            let (from, to) = (self.stage_channels[stage], self.stage_channels[stage + 1]);
            let reduction = self.upsample_channel_reductions[stage];
            if reduction.checked_mul(to) != Some(from) {
                let problem = format!("{reduction} does not take {from} channels to {to}");
                return invalid("upsample_channel_reductions", problem);
            }
        }
        if !(self.timestep_scale_multiplier.is_finite() && self.timestep_scale_multiplier > 0.0) {
            let problem = format!("is {}, expected a positive number", self.timestep_scale_multiplier);
            return invalid("timestep_scale_multiplier", problem);
        }
        Ok(())
    }

    /// Stages that are not the denoising one.
    pub(super) fn deterministic(&self) -> usize {
        self.upsample_strides.len()
    }

    /// Product of the upsamples' factors (T, H, W): tokens of the denoising stage per latent.
    pub(super) fn tokens_per_latent(&self) -> [usize; 3] {
        self.upsample_strides.iter().fold([1; 3], |all, stride| std::array::from_fn(|axis| all[axis] * stride[axis]))
    }

    /// Pixels per latent (T, H, W).
    pub fn compression(&self) -> [usize; 3] {
        let [t, h, w] = self.tokens_per_latent();
        [t, h * self.patch_size, w * self.patch_size]
    }

    /// Pixels (T, H, W) per token of the last stage before the denoising one: where a clip can be cut into tiles.
    pub fn cell(&self) -> [usize; 3] {
        let [t, h, w] = self.upsample_strides.last().copied().unwrap_or([1; 3]);
        [t, h * self.patch_size, w * self.patch_size]
    }

    /// Latent frames appended behind the last, so that its window stays centred on it.
    pub(super) fn ghost_frames(&self) -> usize {
        self.stage_kernels.first().map_or(0, |[t, _, _]| t / 2 * 2)
    }

    /// Tokens (T, H, W) of stage `stage` (0-based; the last one denoises) for latents of so many, without ghosts.
    pub(super) fn grid(&self, stage: usize, latents: [usize; 3]) -> [usize; 3] {
        self.upsample_strides.iter().take(stage).fold(latents, |[t, h, w], &[st, sh, sw]| {
            // The duplicate of the first frame is dropped.
            [st * t - (st - 1), sh * h, sw * w]
        })
    }

    /// The smallest latents (T, H, W) at which no stage's window is wider than its grid.
    pub fn window_floor(&self) -> [usize; 3] {
        let windows = self.stage_kernels.iter().chain([&self.stage5_kernel]);
        let windows: Vec<[usize; 3]> = windows.copied().collect();
        std::array::from_fn(|axis| {
            let fits = |n: usize| windows.iter().enumerate().all(|(i, w)| self.grid(i, [n; 3])[axis] >= w[axis]);
            // The grid is never smaller than the latents, so the widest window bounds the search.
            (1..).find(|&n| fits(n)).unwrap_or(1)
        })
    }
}

fn parse<T: serde::de::DeserializeOwned>(field: &str, json: &Value) -> Result<T> {
    T::deserialize(json).map_err(|e| Error::Config { field: field.to_owned(), problem: e.to_string() })
}

fn invalid<T>(field: &str, problem: String) -> Result<T> {
    Err(Error::Config { field: field.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weights::{
        Safetensors,
        write::{TensorData, to_bytes},
    };

    use super::*;
    use crate::diffusion_decoder::testing::{published, published_json};

    #[test]
    fn both_published_forms_are_the_same_network() {
        let config = DiffusionDecoderConfig::from_json(&published_json()).unwrap();
        assert_eq!(config, published());
        assert_eq!((config.compression(), config.ghost_frames(), config.window_floor()), ([8, 32, 32], 2, [3, 7, 7]));
        let grids: Vec<_> = (0..5).map(|stage| config.grid(stage, [16, 16, 24])).collect();
        assert_eq!(grids, [[16, 16, 24], [16, 32, 48], [31, 32, 48], [61, 64, 96], [121, 128, 192]]);
    }

    #[test]
    fn a_file_says_what_it_is() {
        let file = |metadata: &[(&str, String)]| {
            let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
            let bytes = to_bytes(&[TensorData::f32("x", &[1], &[0.0])], &metadata).unwrap();
            Safetensors::from_bytes(Arc::new(bytes), "a file").unwrap()
        };
        let read = |metadata: &[(&str, String)]| DiffusionDecoderConfig::from_source(&file(metadata));
        assert_eq!(read(&[("config", published_json().to_string())]).unwrap(), published());
        assert!(matches!(read(&[]), Err(Error::NoConfig { .. })));
        for text in ["{", "[]", "{\"vae\": 1}", "{\"vae\": {\"decoder\": {\"_class_name\": \"Decoder\"}}}"] {
            let error = read(&[("config", text.to_owned())]).unwrap_err();
            assert!(matches!(error, Error::Config { .. }) && !error.to_string().contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn nothing_that_shapes_the_result_is_guessed() {
        for key in ["stage_channels", "stage_kernels", "timestep_scale_multiplier", "upsamples", "_class_name"] {
            let mut json = published_json();
            json["vae"]["decoder"].as_object_mut().unwrap().remove(key);
            let error = DiffusionDecoderConfig::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(key) && !error.contains('\n'), "{error}");
        }
        let mut json = published_json();
        json["vae"].as_object_mut().unwrap().remove("model_output_type");
        assert!(DiffusionDecoderConfig::from_json(&json).unwrap_err().to_string().contains("model_output_type"));
    }

    #[test]
    fn networks_that_cannot_be_built_are_refused() {
        type Change = fn(&mut DiffusionDecoderConfig);
        let changes: [(&str, Change); 12] = [
            ("head_dim", |c| c.head_dim = 20),
            ("head_dim", |c| c.head_dim = 0),
            ("stage_channels", |c| c.stage_channels[4] = 32),
            ("stage_channels", |c| c.stage_channels.clear()),
            ("stage_depths", |c| c.stage_depths[1] = 0),
            ("stage_kernels", |c| c.stage_kernels[2] = [3, 4, 5]),
            ("stage_kernels", |c| c.stage5_kernel = [0, 11, 11]),
            ("upsample_strides", |c| c.upsample_strides[0] = [1, 3, 2]),
            ("upsample_strides", |c| c.upsample_strides.truncate(3)),
            ("upsample_channel_reductions", |c| c.upsample_channel_reductions[0] = 1),
            ("timestep_scale_multiplier", |c| c.timestep_scale_multiplier = f64::NAN),
            ("patch_size", |c| c.patch_size = 0),
        ];
        for (field, change) in changes {
            let mut config = published();
            change(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(field), "{field}: {error}");
        }
    }
}
