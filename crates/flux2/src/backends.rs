//! The backends of a model, in force on a thread while it works for it.

use std::{path::Path, sync::Arc};

use candle_fork::cudnn_policy::{self, PlanChoice};
use policy::{AttentionPolicy, ConvPolicy, PolicyGuard};

use crate::options::LoadOptions;

/// What [`LoadOptions`] says of them.
#[derive(Debug, Clone)]
pub(crate) struct Backends {
    conv: ConvPolicy,
    attention: AttentionPolicy,
    plans: PlanChoice,
    plan_cache: Option<Arc<Path>>,
}

/// Keeps them in force until it is dropped.
pub(crate) struct Entered {
    // Only dropped, the last one entered first.
    _policies: [PolicyGuard; 2],
    _plans: cudnn_policy::Guard,
}

impl Backends {
    pub(crate) fn of(options: &LoadOptions) -> Self {
        let LoadOptions { conv, attention, plans, plan_cache, .. } = options.clone();
        Self { conv, attention, plans, plan_cache }
    }

    /// Puts them in force on this thread.
    pub(crate) fn enter(&self) -> Entered {
        let mut policy = cudnn_policy::current();
        policy.choice = self.plans;
        policy.plan_cache = self.plan_cache.clone();
        let plans = cudnn_policy::enter(policy);
        Entered { _policies: [self.conv.enter(), self.attention.enter()], _plans: plans }
    }
}
