//! Policies in force on a thread.

use std::{path::Path, sync::Arc};

use candle_fork::cudnn_policy::{self, Attention, Backend, PlanChoice, Policy};

use crate::{AttentionPolicy, ConvPolicy, ModelFamily};

/// Keeps a policy in force on its thread; dropping it, also by a panic, ends that. Guards nest.
///
/// Bind it to a name: `let _ = policy.enter();` ends at once. Other threads are not concerned, those of a pool neither: work
/// handed to them enters the policy itself. Do not hold it across an `await`.
#[must_use = "the policy ends when the guard is dropped"]
#[derive(Debug)]
pub struct PolicyGuard {
    // Only dropped.
    _guard: cudnn_policy::Guard,
}

/// Changes the policy of this thread, of which each of ours is a part.
fn enter(change: impl FnOnce(&mut Policy)) -> PolicyGuard {
    let mut policy = cudnn_policy::current();
    change(&mut policy);
    PolicyGuard { _guard: cudnn_policy::enter(policy) }
}

impl ConvPolicy {
    /// Puts the policy in force on this thread until the guard is dropped. What else
    /// [`cudnn_policy`](candle_fork::cudnn_policy) holds stays as it is.
    ///
    /// ```
    /// use candle_fork::cudnn_policy::{Backend, current};
    /// use policy::ConvPolicy;
    ///
    /// let guard = ConvPolicy::CudnnAuto.enter();
    /// assert_eq!(current().backend, Backend::Auto);
    /// drop(guard);
    /// assert_eq!(current().backend, Backend::Im2col);
    /// ```
    pub fn enter(self) -> PolicyGuard {
        enter(|policy| {
            policy.backend = match self {
                ConvPolicy::Im2col => Backend::Im2col,
                ConvPolicy::CudnnAuto => Backend::Auto,
                ConvPolicy::CudnnRequired => Backend::Required,
            };
        })
    }

    /// Runs `f` under the policy.
    pub fn scope<R>(self, f: impl FnOnce() -> R) -> R {
        let _guard = self.enter();
        f()
    }
}

impl AttentionPolicy {
    /// Puts the policy in force on this thread until the guard is dropped, as [`ConvPolicy::enter`] does.
    pub fn enter(self) -> PolicyGuard {
        enter(|policy| {
            policy.attention = match self {
                AttentionPolicy::Math => Attention::Math,
                AttentionPolicy::FusedAuto => Attention::Auto,
                AttentionPolicy::FusedRequired => Attention::Required,
            };
        })
    }

    /// Runs `f` under the policy.
    pub fn scope<R>(self, f: impl FnOnce() -> R) -> R {
        let _guard = self.enter();
        f()
    }
}

/// What a model computes with: what its load options say, put in force on a thread while it works for it.
#[derive(Debug, Clone)]
pub struct Backends {
    /// Convolutions.
    pub conv: ConvPolicy,
    /// Attention.
    pub attention: AttentionPolicy,
    /// How cuDNN's plans are chosen.
    pub plans: PlanChoice,
    /// Folder that keeps chosen plans for later processes.
    pub plan_cache: Option<Arc<Path>>,
}

/// Keeps [`Backends`] in force until it is dropped.
#[must_use = "the backends end when the guard is dropped"]
#[derive(Debug)]
pub struct BackendsGuard {
    // Only dropped, the last one entered first.
    _policies: [PolicyGuard; 2],
    _plans: PolicyGuard,
}

impl Backends {
    /// Those of a family: its policies, and plans that are timed, once for each shape, and kept in memory only.
    pub fn for_family(family: ModelFamily) -> Self {
        Self {
            conv: ConvPolicy::for_family(family),
            attention: AttentionPolicy::for_family(family),
            plans: PlanChoice::Timed { max_plans: 32, runs: 3 },
            plan_cache: None,
        }
    }

    /// Puts them in force on this thread.
    pub fn enter(&self) -> BackendsGuard {
        let plans = enter(|policy| {
            policy.choice = self.plans;
            policy.plan_cache.clone_from(&self.plan_cache);
        });
        BackendsGuard { _policies: [self.conv.enter(), self.attention.enter()], _plans: plans }
    }
}

#[cfg(test)]
mod tests {
    use std::{panic, sync::Barrier, thread};

    use super::*;

    fn in_force() -> (Backend, Attention) {
        (cudnn_policy::backend(), cudnn_policy::attention())
    }

    const DEFAULT: (Backend, Attention) = (Backend::Im2col, Attention::Math);

    #[test]
    fn the_two_policies_do_not_touch_each_other() {
        let _conv = ConvPolicy::CudnnAuto.enter();
        {
            let _attention = AttentionPolicy::FusedRequired.enter();
            assert_eq!(in_force(), (Backend::Auto, Attention::Required));
            ConvPolicy::Im2col.scope(|| assert_eq!(in_force(), (Backend::Im2col, Attention::Required)));
            assert_eq!(in_force(), (Backend::Auto, Attention::Required));
        }
        assert_eq!(in_force(), (Backend::Auto, Attention::Math));
    }

    #[test]
    fn other_settings_of_the_thread_stay() {
        let mut policy = Policy::new(Backend::Im2col);
        policy.workspace_cap = 123;
        let _outer = cudnn_policy::enter(policy);
        let _inner = ConvPolicy::CudnnRequired.enter();
        let current = cudnn_policy::current();
        assert_eq!((current.backend, current.workspace_cap), (Backend::Required, 123));
    }

    #[test]
    fn a_panic_ends_the_policy() {
        let caught = panic::catch_unwind(|| {
            ConvPolicy::CudnnAuto.scope(|| {
                let _attention = AttentionPolicy::FusedAuto.enter();
                panic::resume_unwind(Box::new("unwinding"))
            })
        });
        assert!(caught.is_err());
        assert_eq!(in_force(), DEFAULT);
    }

    #[test]
    fn threads_have_their_own_policies_and_start_at_the_default() {
        let barrier = Barrier::new(3);
        thread::scope(|s| {
            let video = s.spawn(|| {
                let _conv = ConvPolicy::CudnnAuto.enter();
                let _attention = AttentionPolicy::FusedAuto.enter();
                barrier.wait();
                in_force()
            });
            let bench = s.spawn(|| {
                let _conv = ConvPolicy::CudnnRequired.enter();
                barrier.wait();
                let nested = thread::spawn(in_force).join().unwrap();
                (in_force(), nested)
            });
            barrier.wait();
            assert_eq!(in_force(), DEFAULT);
            assert_eq!(video.join().unwrap(), (Backend::Auto, Attention::Auto));
            assert_eq!(bench.join().unwrap(), ((Backend::Required, Attention::Math), DEFAULT));
        });
    }
}
