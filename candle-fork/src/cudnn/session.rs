//! A thread's access to cuDNN on one stream of one device.

use std::{path::Path, rc::Rc, sync::Arc};

use super::{
    attention::Form,
    device::DeviceInfo,
    disk::DiskCache,
    errata,
    graph::Graph,
    handle::{self, Handle},
    library::{Library, library},
    memory::{Key, plans},
    plan::{Choice, Plan, Site, Timer},
    refusal::Refusal,
    rules::Rules,
    sys::RawStream,
};
use crate::cudnn_policy::{FallbackReason, PlanChoice, Policy, count};

/// See the module.
pub(crate) struct Session {
    library: &'static Library,
    device: Arc<DeviceInfo>,
    handle: Rc<Handle>,
}

impl Session {
    /// Access to `stream`, whose context must be current.
    ///
    /// # Errors
    /// [`FallbackReason::Unavailable`] if there is no library, or none for this device and driver.
    ///
    /// # Safety
    /// `stream` is a live stream of the device, whose context is current for as long as the session lives.
    pub(crate) unsafe fn open(device: Arc<DeviceInfo>, stream: RawStream) -> Result<Self, Refusal> {
        let library = library()?;
        if let Some(failure) = library.broken() {
            return Err(failure.clone().into());
        }
        device.admit(library)?;
        // SAFETY: the caller vouches for the stream.
        let handle = unsafe { handle::of_thread(library, device.ordinal, stream) }.map_err(|failure| {
            let failure = library.judge(failure);
            Refusal::passing(FallbackReason::Unavailable, format!("no handle on {}: {failure}", device.name))
        })?;
        Ok(Self { library, device, handle })
    }

    /// The operations that describe attention to this library.
    pub(crate) fn attention_form(&self) -> Form {
        Form::of(self.library.version())
    }

    /// A plan for `graph`: from memory, from disk, or built.
    ///
    /// `may_build` is asked before anything that must not happen while the stream is captured. `timer` measures plans
    /// where the policy wants a timed choice.
    pub(crate) fn plan(
        &self,
        graph: impl Into<Graph>,
        policy: &Policy,
        may_build: impl FnOnce() -> bool,
        timer: &mut Timer<'_>,
    ) -> Result<Arc<Plan>, Refusal> {
        let graph = graph.into();
        self.admit(&graph, policy)?;
        let key = Key { device: self.device.clone(), graph, rules: Rules::of(policy, &graph), choice: policy.choice };
        if let Some(entry) = plans().get(&key) {
            return entry.inspect(|_| count(|c| c.plan_cache_hits += 1));
        }
        if !may_build() {
            let text = "the stream is being captured and the plan is not in memory";
            return Err(Refusal::passing(FallbackReason::Capture, text));
        }
        let entry = self.load_or_build(&key, policy.plan_cache.as_deref(), timer);
        if entry.as_ref().err().is_none_or(|refusal| !refusal.passing) {
            plans().insert(key, entry.clone());
        }
        entry
    }

    /// Refuses what need not be asked of the library.
    fn admit(&self, graph: &Graph, policy: &Policy) -> Result<(), Refusal> {
        let (version, capability) = (self.library.version(), self.device.capability);
        if let Graph::Attention(spec) = graph
            && let Some(what) = spec.unsupported(version, capability)
        {
            return Err(Refusal::lasting(FallbackReason::Unsupported, format!("cudnn {version} has no {what}")));
        }
        if !policy.trust_version
            && let Some(what) = errata::objection(graph, version, capability)
        {
            return Err(Refusal::lasting(FallbackReason::Errata, format!("cudnn {version}: {what}")));
        }
        if graph.is_compiled_at_run_time()
            && let Err(attempts) = self.library.nvrtc()
        {
            let tried = attempts.last().map(|last| format!(" ({last})")).unwrap_or_default();
            let text = format!("nvrtc, which compiles the kernels, could not be loaded{tried}");
            return Err(Refusal::lasting(FallbackReason::Unavailable, text));
        }
        Ok(())
    }

    fn load_or_build(&self, key: &Key, root: Option<&Path>, timer: &mut Timer<'_>) -> Result<Arc<Plan>, Refusal> {
        let site = Site::Handle(&self.handle);
        let opened = root.map(|root| DiskCache::open(root, self.library.version(), &self.device)).transpose();
        let disk = opened.unwrap_or_else(|error| {
            tracing::warn!(%error, "cudnn plans are not kept on disk");
            None
        });
        let text = format!("{} {:?} {:?}", key.graph.key(), key.rules, key.choice);
        if let Some(disk) = &disk
            && let Some(json) = disk.load(&text)
        {
            match Plan::load(self.library, key.graph, site, &json) {
                Ok(plan) if key.rules.admit_workspace(plan.workspace()).is_ok() => {
                    count(|c| c.plans_loaded += 1);
                    return Ok(Arc::new(plan));
                }
                Ok(_) => disk.remove(&text),
                Err(failure) => {
                    tracing::debug!(%failure, "a cudnn plan on disk does not load and is made anew");
                    disk.remove(&text);
                }
            }
        }
        let choice = match key.choice {
            PlanChoice::Heuristic => Choice::First,
            PlanChoice::Timed { max_plans, .. } => Choice::Timed { max_plans, timer },
        };
        let plan = Plan::build(self.library, key.graph, site, &key.rules, choice)?;
        count(|c| c.plans_built += 1);
        tracing::debug!(engine = %plan.engine(), workspace = plan.workspace(), graph = %key.graph.key(), "cudnn plan");
        if let Some(disk) = &disk {
            let stored = plan
                .to_json()
                .map_err(|failure| failure.to_string())
                .and_then(|json| disk.store(&text, &json).map_err(|error| error.to_string()));
            if let Err(error) = stored {
                tracing::debug!(error, "a cudnn plan was not written to disk");
            }
        }
        Ok(Arc::new(plan))
    }

    /// Enqueues a plan on the session's stream. `addresses` as in [`Plan::execute`].
    ///
    /// A failure forgets nothing: the library may have failed for want of memory.
    ///
    /// # Safety
    /// As for [`Plan::execute`]; the plan comes from [`Self::plan`].
    pub(crate) unsafe fn execute(&self, plan: &Plan, addresses: &[u64], workspace: u64) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller; the context is current by the contract of `open`.
        unsafe { plan.execute(self.library, &self.handle, addresses, workspace) }?;
        Ok(())
    }
}
