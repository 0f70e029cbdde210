//! Components that come from elsewhere than the model's folder.

use std::{fmt, sync::Arc};

use weights::TensorSource;

/// Weights that take the place of those in a model's folder; what is `None` comes from the folder. Configurations always
/// do, so the folder has to be that of a model of the same size.
///
/// Any layout will do that [`crate::layouts`] understands, plain or quantised: see [`weights::open()`].
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Components {
    /// The transformer.
    pub transformer: Option<Arc<dyn TensorSource>>,
    /// The text encoder.
    pub text_encoder: Option<Arc<dyn TensorSource>>,
    /// The VAE.
    pub vae: Option<Arc<dyn TensorSource>>,
}

impl Components {
    /// The same with another transformer.
    #[must_use]
    pub fn with_transformer(self, source: Arc<dyn TensorSource>) -> Self {
        Self { transformer: Some(source), ..self }
    }

    /// The same with another text encoder.
    #[must_use]
    pub fn with_text_encoder(self, source: Arc<dyn TensorSource>) -> Self {
        Self { text_encoder: Some(source), ..self }
    }

    /// The same with another VAE.
    #[must_use]
    pub fn with_vae(self, source: Arc<dyn TensorSource>) -> Self {
        Self { vae: Some(source), ..self }
    }

    /// The one of this name: `text_encoder`, `transformer` or `vae`.
    pub(super) fn get(&self, component: &str) -> Option<Arc<dyn TensorSource>> {
        match component {
            "text_encoder" => self.text_encoder.clone(),
            "transformer" => self.transformer.clone(),
            "vae" => self.vae.clone(),
            _ => None,
        }
    }
}

impl fmt::Debug for Components {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |source: &Option<Arc<dyn TensorSource>>| source.as_ref().map(|source| source.describe().to_owned());
        f.debug_struct("Components")
            .field("transformer", &name(&self.transformer))
            .field("text_encoder", &name(&self.text_encoder))
            .field("vae", &name(&self.vae))
            .finish()
    }
}
