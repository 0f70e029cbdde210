//! The components of a pipeline: loaded when they are needed, and dropped to make room for one another.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use crate::error::Result;

/// A component that may have to be loaded.
pub(super) struct Component<T> {
    loaded: Mutex<Option<Arc<T>>>,
}

impl<T> Default for Component<T> {
    fn default() -> Self {
        Self { loaded: Mutex::default() }
    }
}

impl<T> fmt::Debug for Component<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Component").field("loaded", &self.is_loaded()).finish()
    }
}

impl<T> Component<T> {
    /// The component, if it is there and `serves`; else what `load` gives, for later calls as well. A component that does
    /// not serve is dropped before another is loaded.
    pub(super) fn get(&self, serves: impl FnOnce(&T) -> bool, load: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        // A panic while the lock is held cannot leave it half-made, so a poisoned lock is still good.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(component) = loaded.as_ref()
            && serves(component)
        {
            return Ok(component.clone());
        }
        *loaded = None;
        Ok(loaded.insert(Arc::new(load()?)).clone())
    }

    /// Drops it, unless a run on another thread still uses it: then with the end of that run. Says whether it was there.
    pub(super) fn release(&self) -> bool {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }

    /// Whether it is there.
    pub(super) fn is_loaded(&self) -> bool {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_component_is_loaded_once_until_it_is_released_or_does_not_serve() {
        let component = Component::default();
        let loads = Cell::new(0);
        let get = |least: i32| {
            let load = || {
                loads.set(loads.get() + 1);
                Ok(loads.get())
            };
            *component.get(|&value| value >= least, load).unwrap()
        };
        assert_eq!((get(0), get(0)), (1, 1));
        assert!(component.release() && !component.release());
        assert!(!component.is_loaded());
        assert_eq!((get(0), get(2), get(3)), (2, 2, 3));
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let component = Component::default();
        let failed = component.get(|_| true, || Err(crate::Error::Guidance { got: 1.0 }));
        assert!(failed.is_err() && !component.is_loaded());
        assert_eq!(*component.get(|_| true, || Ok(5)).unwrap(), 5);
    }
}
