//! Components that come from elsewhere than the model's folder.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use weights::{ModelFolder, TensorSource};

use super::TensorSources;

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

    /// Where all components come from: those that are not given here from `folder`. A component is opened when it is first
    /// asked for, and once: its files are read, and checked, no second time when weights are loaded, dropped and loaded again.
    #[must_use]
    pub fn sources(self, folder: &ModelFolder) -> TensorSources {
        let folder = folder.clone();
        let opened = Mutex::new(Vec::<(String, Arc<dyn TensorSource>)>::new());
        Arc::new(move |component| {
            if let Some(given) = self.get(component) {
                return Ok(given);
            }
            // A panic while the lock is held cannot leave the list half-made, so a poisoned lock is still good.
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, source)) = opened.iter().find(|(name, _)| name == component) {
                return Ok(source.clone());
            }
            let source = folder.tensors(component)?;
            opened.push((component.to_owned(), source.clone()));
            Ok(source)
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::demo;

    #[test]
    fn a_component_is_opened_once_and_what_is_given_goes_first() {
        let sources = Components::default().sources(&demo());
        let [first, again] = [(); 2].map(|()| sources("vae").expect("the demonstration VAE"));
        assert!(Arc::ptr_eq(&first, &again));
        let other = sources("transformer").expect("the demonstration transformer");
        assert!(!Arc::ptr_eq(&first, &other));
        let given = Components::default().with_transformer(first.clone()).sources(&demo());
        assert!(Arc::ptr_eq(&given("transformer").expect("given"), &first));
        assert!(given("nothing").is_err());
    }
}
