//! The thread-local switch that lets ops use cuDNN, and counters of what came of it.
//!
//! A thread starts at [`Policy::default`]: im2col and attention of our own, the same bytes whatever libraries are installed.
//! [`enter`] changes the policy until its guard is dropped, [`scope`] for the length of a call. Threads never see each
//! other's policy: work handed to a pool runs under the default unless it enters a policy itself.
//!
//! [`Counters`] are per thread as well. [`Counters::dispatched`] counts executions that cuDNN accepted, after the last
//! point at which a fallback could still happen, so a test can hold that a path was really taken.
//!
//! The module exists in every build and knows nothing of CUDA; without feature `cuda` the policy steers nothing.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    path::Path,
    sync::Arc,
};

/// Which implementation of convolution a thread may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Backend {
    /// This crate's tiled im2col.
    #[default]
    Im2col,
    /// cuDNN where it pays and serves, im2col otherwise; the reason of a fallback is counted.
    Auto,
    /// cuDNN; a fallback is [`Error::FallbackRefused`](crate::Error::FallbackRefused). Products in disguise (filters of
    /// one tap, stride 1, no padding) still run as matrix products: that is no fallback.
    Required,
}

/// Which implementation of attention a thread may use. It matters on CUDA alone.
///
/// Every one of them takes f32, and heads that no fused kernel serves, to matrix products and a softmax, but for
/// [`Self::Required`]. A mask, which cuDNN's kernel lacks, goes to this crate's own fused kernel under every one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Attention {
    /// This crate's own: a fused kernel for half precision, products and a softmax for the rest.
    #[default]
    Math,
    /// cuDNN's fused kernel in half precision, this crate's own where it does not serve; the reason of a fallback is
    /// counted. The kernel is compiled at run time, half a second for each new shape; see [`Policy::plan_cache`].
    Auto,
    /// A fused kernel, of cuDNN unless there is a mask; a fallback is
    /// [`Error::FallbackRefused`](crate::Error::FallbackRefused).
    Required,
}

/// How one of several execution plans is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PlanChoice {
    /// The first plan of cuDNN's own order that can be built.
    #[default]
    Heuristic,
    /// The fastest of the first `max_plans` that can be built, each run `runs` times after a run that does not count. The
    /// choice depends on the clock: two processes may choose plans that round differently, unless they share a plan cache.
    Timed {
        /// Plans compared.
        max_plans: usize,
        /// Timed runs of each.
        runs: usize,
    },
}

/// What a thread allows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Policy {
    /// Implementation of convolutions.
    pub backend: Backend,
    /// Implementation of attention.
    pub attention: Attention,
    /// Let this crate's own attention use the products by groups of warps of compute capability 9.0, for heads of 72 to 128
    /// components. Twice as fast, with other bytes than without; on other devices it means nothing. On by default.
    pub warp_groups: bool,
    /// Only engines that give the same bytes run to run. On by default: for forward convolutions it costs nothing.
    pub deterministic: bool,
    /// Let f32 convolutions round their inputs to TF32 (10 bits of mantissa). Off by default.
    pub allow_tf32: bool,
    /// Let f32 convolutions use transformed domains (Winograd, FFT), which are less exact. Off by default.
    pub allow_transforms: bool,
    /// Let cuDNN compile convolutions at run time (0.5 s and more per shape) where it has none ready. Off by default.
    pub allow_run_time_compiled: bool,
    /// Use cuDNN also in versions that are known to give wrong results for the problem at hand, or that do not document it.
    /// Off by default.
    pub trust_version: bool,
    /// Most workspace of one execution in bytes; plans that need more are passed over. 1 GiB by default.
    pub workspace_cap: u64,
    /// How a plan is chosen.
    pub choice: PlanChoice,
    /// Directory in which plans outlive the process; none by default. It must belong to the user and be writable by
    /// nobody else: plans hold code for the GPU.
    pub plan_cache: Option<Arc<Path>>,
}

impl Policy {
    /// The default with another backend.
    #[must_use]
    pub fn new(backend: Backend) -> Self {
        Self { backend, ..Self::default() }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            backend: Backend::Im2col,
            attention: Attention::Math,
            warp_groups: true,
            deterministic: true,
            allow_tf32: false,
            allow_transforms: false,
            allow_run_time_compiled: false,
            trust_version: false,
            workspace_cap: 1 << 30,
            choice: PlanChoice::Heuristic,
            plan_cache: None,
        }
    }
}

/// Why a convolution or an attention that the policy wanted on cuDNN ran elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FallbackReason {
    /// No usable library, or the device or driver is not one that it serves.
    Unavailable,
    /// The library's version is known to give wrong results for this problem.
    Errata,
    /// The library has no plan for this problem that the policy allows.
    Unsupported,
    /// Every plan needs more workspace than the policy allows.
    Workspace,
    /// A plan would have to be built while the stream is being captured.
    Capture,
    /// The library failed to build or to run a plan.
    Failed,
}

impl fmt::Display for FallbackReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            FallbackReason::Unavailable => "cudnn is not available",
            FallbackReason::Errata => "this cudnn version is known to be wrong here",
            FallbackReason::Unsupported => "cudnn has no plan for this",
            FallbackReason::Workspace => "every plan needs more workspace than allowed",
            FallbackReason::Capture => "no plan can be built during capture",
            FallbackReason::Failed => "cudnn failed",
        })
    }
}

/// What happened on this thread since it began, or since [`take_counters`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Convolutions that were to run on cuDNN.
    pub attempts: u64,
    /// Convolutions that did: cuDNN accepted the execution.
    pub dispatched: u64,
    /// Convolutions that ran elsewhere after an attempt, by reason.
    pub fallbacks: BTreeMap<FallbackReason, u64>,
    /// The same for attention, and what ran instead.
    pub attention: AttentionCounters,
    /// Plans built from scratch.
    pub plans_built: u64,
    /// Plans read from the directory of [`Policy::plan_cache`].
    pub plans_loaded: u64,
    /// Plans found in memory.
    pub plan_cache_hits: u64,
    /// Largest workspace of an execution by cuDNN in bytes.
    pub workspace_high_water: u64,
    /// The engine that ran last, in cuDNN's numbering for the pattern.
    pub last_engine: Option<Arc<str>>,
}

impl Counters {
    /// Fallbacks of convolutions, for every reason.
    #[must_use]
    pub fn fallback_total(&self) -> u64 {
        self.fallbacks.values().sum()
    }
}

/// The part of [`Counters`] that is about attention on CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct AttentionCounters {
    /// Calls that were to run on cuDNN.
    pub attempts: u64,
    /// Calls that did: cuDNN accepted the execution.
    pub dispatched: u64,
    /// Calls that ran elsewhere after an attempt, by reason.
    pub fallbacks: BTreeMap<FallbackReason, u64>,
    /// Calls of this crate's own fused kernels.
    pub fused: u64,
    /// Those of them that used [`Policy::warp_groups`].
    pub warp_groups: u64,
    /// Calls that ran as products and a softmax.
    pub products: u64,
}

impl AttentionCounters {
    /// Fallbacks of every reason.
    #[must_use]
    pub fn fallback_total(&self) -> u64 {
        self.fallbacks.values().sum()
    }
}

thread_local! {
    /// Policies entered and not left, oldest first. A stack with identities rather than a saved previous value, so that
    /// guards dropped out of order leave nothing behind.
    static ENTERED: RefCell<Vec<(u64, Policy)>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
    static COUNTERS: RefCell<Counters> = RefCell::new(Counters::default());
}

/// The policy of this thread.
#[must_use]
pub fn current() -> Policy {
    ENTERED.with_borrow(|entered| entered.last().map(|(_, policy)| policy.clone()).unwrap_or_default())
}

/// The backend of [`current`], without a copy of the rest.
#[must_use]
pub fn backend() -> Backend {
    ENTERED.with_borrow(|entered| entered.last().map(|(_, policy)| policy.backend).unwrap_or_default())
}

/// The implementation of attention of [`current`], without a copy of the rest.
#[must_use]
pub fn attention() -> Attention {
    ENTERED.with_borrow(|entered| entered.last().map(|(_, policy)| policy.attention).unwrap_or_default())
}

/// Whether [`Policy::warp_groups`] of [`current`] is set, without a copy of the rest.
#[cfg(feature = "cuda")]
pub(crate) fn warp_groups() -> bool {
    ENTERED.with_borrow(|entered| entered.last().is_none_or(|(_, policy)| policy.warp_groups))
}

/// Sets the policy of this thread until the guard is dropped, also by a panic.
///
/// Bind it to a name: `let _ = enter(policy);` ends at once. Do not hold it across an `await`: the task may go on on
/// another thread, which keeps its own policy.
///
/// ```
/// use candle_fork::cudnn_policy::{self, Backend, Policy};
///
/// let guard = cudnn_policy::enter(Policy::new(Backend::Auto));
/// assert_eq!(cudnn_policy::current().backend, Backend::Auto);
/// drop(guard);
/// assert_eq!(cudnn_policy::current().backend, Backend::Im2col);
/// ```
pub fn enter(policy: Policy) -> Guard {
    let id = NEXT.get();
    NEXT.set(id + 1);
    ENTERED.with_borrow_mut(|entered| entered.push((id, policy)));
    Guard { id, not_send: PhantomData }
}

/// Runs `f` under `policy`.
pub fn scope<R>(policy: Policy, f: impl FnOnce() -> R) -> R {
    let _guard = enter(policy);
    f()
}

/// Keeps a policy in force; see [`enter`]. Tied to its thread:
///
/// ```compile_fail
/// use candle_fork::cudnn_policy::{self, Policy};
///
/// let guard = cudnn_policy::enter(Policy::default());
/// std::thread::spawn(move || drop(guard));
/// ```
#[must_use = "the policy ends when the guard is dropped"]
#[derive(Debug)]
pub struct Guard {
    id: u64,
    not_send: PhantomData<*const ()>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        // A guard kept in a thread-local may outlive the stack; then there is nothing left to restore.
        let _ = ENTERED.try_with(|entered| entered.borrow_mut().retain(|(id, _)| *id != self.id));
    }
}

/// The counters of this thread.
#[must_use]
pub fn counters() -> Counters {
    COUNTERS.with_borrow(Clone::clone)
}

/// The counters of this thread, which start again at zero.
pub fn take_counters() -> Counters {
    COUNTERS.with_borrow_mut(std::mem::take)
}

/// Changes the counters of this thread.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only cuDNN counts"))]
pub(crate) fn count(change: impl FnOnce(&mut Counters)) {
    COUNTERS.with_borrow_mut(change);
}

#[cfg(test)]
mod tests {
    use std::{panic, sync::Barrier, thread};

    use super::*;

    fn auto() -> Policy {
        Policy::new(Backend::Auto)
    }

    fn required() -> Policy {
        Policy::new(Backend::Required)
    }

    #[test]
    fn a_thread_starts_at_im2col_without_relaxations() {
        let _guard = enter(required());
        let fresh = thread::spawn(|| (current(), backend(), counters())).join().unwrap();
        assert_eq!(fresh, (Policy::default(), Backend::Im2col, Counters::default()));
        let policy = Policy::default();
        assert!(policy.deterministic);
        assert!(!policy.allow_tf32 && !policy.allow_transforms && !policy.trust_version);
        assert_eq!(policy.plan_cache, None);
    }

    #[test]
    fn guards_nest_and_restore_in_order() {
        assert_eq!(backend(), Backend::Im2col);
        {
            let _outer = enter(auto());
            {
                let _inner = enter(required());
                assert_eq!((backend(), current()), (Backend::Required, required()));
            }
            assert_eq!((backend(), current()), (Backend::Auto, auto()));
        }
        assert_eq!((backend(), current()), (Backend::Im2col, Policy::default()));
    }

    #[test]
    fn guards_dropped_out_of_order_leave_nothing_behind() {
        let outer = enter(auto());
        let inner = enter(required());
        drop(outer);
        assert_eq!(backend(), Backend::Required);
        drop(inner);
        assert_eq!(backend(), Backend::Im2col);
    }

    #[test]
    fn a_panic_restores_the_policy() {
        let _outer = enter(auto());
        let caught = panic::catch_unwind(|| {
            scope(required(), || {
                assert_eq!(backend(), Backend::Required);
                panic::resume_unwind(Box::new("unwinding"));
            })
        });
        assert!(caught.is_err());
        assert_eq!(backend(), Backend::Auto);
    }

    #[test]
    fn scope_returns_the_value_and_ends() {
        assert_eq!(scope(auto(), backend), Backend::Auto);
        assert_eq!(backend(), Backend::Im2col);
    }

    #[test]
    fn threads_do_not_disturb_each_other() {
        let barrier = Barrier::new(2);
        thread::scope(|s| {
            let other = s.spawn(|| {
                let _guard = enter(required());
                count(|c| c.dispatched += 5);
                barrier.wait();
                let seen = (backend(), counters().dispatched);
                barrier.wait();
                seen
            });
            {
                let _guard = enter(auto());
                count(|c| c.dispatched += 1);
                barrier.wait();
                assert_eq!((backend(), counters().dispatched), (Backend::Auto, 1));
                barrier.wait();
            }
            assert_eq!(other.join().unwrap(), (Backend::Required, 5));
        });
        assert_eq!(backend(), Backend::Im2col);
    }

    #[test]
    fn counters_are_taken_once() {
        let counted = thread::spawn(|| {
            count(|c| {
                c.attempts += 2;
                *c.fallbacks.entry(FallbackReason::Errata).or_default() += 1;
                *c.fallbacks.entry(FallbackReason::Unavailable).or_default() += 2;
                *c.attention.fallbacks.entry(FallbackReason::Unsupported).or_default() += 7;
            });
            let seen = counters();
            (seen.clone(), take_counters() == seen, take_counters())
        });
        let (seen, same, after) = counted.join().unwrap();
        assert_eq!((seen.attempts, seen.fallback_total(), same), (2, 3, true));
        assert_eq!((seen.attention.attempts, seen.attention.fallback_total()), (0, 7));
        assert_eq!(after, Counters::default());
    }
}
