//! Plans in memory: those that were built, and problems for which there are none.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, LazyLock, Mutex, MutexGuard},
};

use super::{device::DeviceInfo, graph::Graph, plan::Plan, refusal::Refusal, rules::Rules};
use crate::cudnn_policy::PlanChoice;

/// Plans kept at most.
const CAPACITY: usize = 512;

/// Everything on which a plan depends, apart from the library, of which a process has one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) device: Arc<DeviceInfo>,
    pub(super) graph: Graph,
    pub(super) rules: Rules,
    pub(super) choice: PlanChoice,
}

/// A plan, or why there is none.
pub(super) type Entry = Result<Arc<Plan>, Refusal>;

/// The plans of the process.
pub(super) fn plans() -> MutexGuard<'static, Recent<Key, Entry>> {
    static PLANS: LazyLock<Mutex<Recent<Key, Entry>>> = LazyLock::new(|| Mutex::new(Recent::new(CAPACITY)));
    PLANS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A map that forgets what was used least recently.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    entries: HashMap<K, (V, u64)>,
    capacity: usize,
    clock: u64,
}

impl<K: Hash + Eq + Clone, V: Clone> Recent<K, V> {
    fn new(capacity: usize) -> Self {
        Self { entries: HashMap::new(), capacity, clock: 0 }
    }

    /// The value of `key`, which counts as a use.
    pub(super) fn get(&mut self, key: &K) -> Option<V> {
        self.clock += 1;
        let (value, used) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value.clone())
    }

    /// Sets the value of `key`.
    pub(super) fn insert(&mut self, key: K, value: V) {
        self.clock += 1;
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            // A scan, but only after hundreds of different problems.
            let oldest = self.entries.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, (value, self.clock));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_is_forgotten() {
        let mut map = Recent::new(2);
        map.insert("a", 1);
        map.insert("b", 2);
        assert_eq!(map.get(&"a"), Some(1));
        map.insert("c", 3);
        assert_eq!((map.get(&"a"), map.get(&"b"), map.get(&"c")), (Some(1), None, Some(3)));
    }

    #[test]
    fn a_new_value_takes_the_place_of_the_old_one() {
        let mut map = Recent::new(2);
        map.insert("a", 1);
        map.insert("b", 2);
        map.insert("a", 3);
        assert_eq!((map.get(&"a"), map.get(&"b")), (Some(3), Some(2)));
    }
}
