//! Plans: an engine with its settings for one graph, ready to run.

use std::{
    fmt::Write,
    sync::{Arc, Mutex},
};

use super::{
    descriptor::{BehaviorNote, Descriptor, Finalised, HeuristicsMode, NumericalNote},
    graph::Graph,
    handle::Handle,
    library::{Library, Version},
    refusal::{Failure, Refusal},
    rules::{Notes, Objection, Rules, Tally},
    sys::{attribute, descriptor, heuristics, status},
};

/// The first version whose graphs need no handle.
#[cfg(test)]
const GRAPHS_WITHOUT_HANDLE: Version = Version(90_800);

/// The first version that tells the workspace of a configuration before it is built.
const WORKSPACE_OF_CONFIGURATION: Version = Version(90_200);

/// Plans that are compiled at run time take long to build: a timed choice looks at no more than these.
const TIMED_RUN_TIME_COMPILED: usize = 2;

/// One heuristic of the library computes for long and is known to be asked by one thread at a time only.
static MODE_B: Mutex<()> = Mutex::new(());

/// The device that plans are made for.
#[derive(Clone, Copy)]
pub(super) enum Site<'a> {
    /// That of a handle.
    Handle(&'a Handle),
    /// One that is only described, for planning without a device.
    #[cfg(test)]
    Described(&'a Finalised),
}

impl Site<'_> {
    /// A plan descriptor for this device. The only way to get one: finalised without a device it ends the process.
    fn plan(self, library: &'static Library) -> Result<Descriptor, Failure> {
        let plan = Descriptor::new(library, descriptor::EXECUTION_PLAN)?;
        match self {
            Site::Handle(handle) => plan.handle(attribute::PLAN_HANDLE, handle.as_raw()),
            #[cfg(test)]
            Site::Described(device) => plan.descriptors(attribute::PLAN_DEVICE_PROPERTIES, &[device]),
        }
    }

    fn heuristics(self, library: &'static Library) -> Result<Descriptor, Failure> {
        let heuristics = Descriptor::new(library, descriptor::ENGINE_HEURISTICS)?;
        match self {
            Site::Handle(_) => Ok(heuristics),
            #[cfg(test)]
            Site::Described(device) => heuristics.descriptors(attribute::HEURISTICS_DEVICE_PROPERTIES, &[device]),
        }
    }

    fn describe(self, library: &'static Library, graph: &Graph) -> Result<(Finalised, Vec<Finalised>), Failure> {
        match self {
            Site::Handle(handle) => graph.describe(library, Some(handle.as_raw())),
            #[cfg(test)]
            Site::Described(_) if library.version() >= GRAPHS_WITHOUT_HANDLE => graph.describe(library, None),
            #[cfg(test)]
            Site::Described(_) => panic!("{} is older than {GRAPHS_WITHOUT_HANDLE}", library.version()),
        }
    }
}

/// Seconds or any other measure that a plan takes, less is better. It may give up on a plan that takes longer than the
/// second argument.
pub(crate) type Timer<'a> = dyn FnMut(&Plan, f64) -> Result<f64, Refusal> + 'a;

/// How one of the plans that can be built is chosen.
pub(super) enum Choice<'a> {
    /// The first.
    First,
    /// The fastest of the first `max_plans`.
    Timed { max_plans: usize, timer: &'a mut Timer<'a> },
}

/// A plan. Immutable: threads may share it, each with its own handle.
#[derive(Debug)]
pub(crate) struct Plan {
    plan: Finalised,
    /// The graph and its configuration, which the plan may refer to.
    _parts: Option<(Arc<Parts>, Finalised)>,
    operands: &'static [i64],
    workspace: u64,
    engine: Arc<str>,
}

type Parts = (Finalised, Vec<Finalised>);

/// An engine with settings that passed the rules, not built yet.
struct Candidate {
    configuration: Finalised,
    notes: Notes,
}

impl Plan {
    /// Builds a plan: configurations of the library's heuristics in their order, without those that `rules` forbid; the
    /// first that can be built, or by time.
    pub(super) fn build(
        library: &'static Library,
        graph: impl Into<Graph>,
        site: Site<'_>,
        rules: &Rules,
        mut choice: Choice<'_>,
    ) -> Result<Self, Refusal> {
        let graph = graph.into();
        let parts = Arc::new(site.describe(library, &graph).map_err(|failure| library.judge(failure))?);
        let wanted = match &choice {
            Choice::First => 1,
            Choice::Timed { max_plans, .. } => (*max_plans).max(1),
        };
        let mut search =
            Search { library, graph, site, rules, parts, tally: Tally::default(), built: Vec::new(), wanted };
        search.run();
        let mut built = search.built.into_iter().map(|(plan, _)| plan);
        let Some(first) = built.next() else {
            return Err(Refusal::lasting(search.tally.reason(), search.tally.to_string()));
        };
        let Choice::Timed { timer, .. } = &mut choice else { return Ok(first) };
        let mut best = (timer(&first, f64::INFINITY)?, first);
        for plan in built {
            // One that does not run is no reason to refuse the others; one that is hardly faster was perhaps lucky.
            let limit = 0.97 * best.0;
            if let Ok(time) = timer(&plan, limit)
                && time < limit
            {
                best = (time, plan);
            }
        }
        Ok(best.1)
    }

    /// Restores a plan from its text. The text must come from the same version of the library and the same kind of
    /// device; the library refuses any other.
    pub(super) fn load(
        library: &'static Library,
        graph: impl Into<Graph>,
        site: Site<'_>,
        json: &str,
    ) -> Result<Self, Failure> {
        let plan = site.plan(library)?.text(attribute::PLAN_JSON, json)?.finalise()?;
        Self::finished(plan, None, &graph.into())
    }

    fn finished(plan: Finalised, parts: Option<(Arc<Parts>, Finalised)>, graph: &Graph) -> Result<Self, Failure> {
        let workspace = u64::try_from(plan.read_integer(attribute::PLAN_WORKSPACE_SIZE)?).unwrap_or(0);
        let engine = plan.read_text(attribute::PLAN_JSON).ok().and_then(|json| engine_of(&json));
        let engine = engine.unwrap_or_else(|| "unknown engine".to_owned()).into();
        Ok(Self { plan, _parts: parts, operands: graph.operands(), workspace, engine })
    }

    /// The plan as a text that [`Self::load`] takes.
    pub(super) fn to_json(&self) -> Result<String, Failure> {
        self.plan.read_text(attribute::PLAN_JSON)
    }

    /// Bytes of scratch memory that an execution needs, aligned to 256.
    pub(crate) fn workspace(&self) -> u64 {
        self.workspace
    }

    /// The engine, in the library's numbering for the pattern, and its settings.
    pub(crate) fn engine(&self) -> &Arc<str> {
        &self.engine
    }

    /// Enqueues the plan on the handle's stream. `addresses` are those of the graph's operands in their order: x, w, y and,
    /// where the pattern has them, bias and residual; or those that [`super::attention`] lists.
    ///
    /// # Safety
    /// - The addresses are multiples of [`super::graph::ALIGNMENT`], on the handle's device, and cover what the plan's
    ///   graph describes until the stream has done the work; results overlap nothing else. That of a scalar is one of the
    ///   host, for the length of the call.
    /// - `workspace` covers [`Self::workspace`] bytes that no other work uses meanwhile.
    /// - The context of the handle's device is current.
    pub(super) unsafe fn execute(
        &self,
        library: &'static Library,
        handle: &Handle,
        addresses: &[u64],
        workspace: u64,
    ) -> Result<(), Failure> {
        if addresses.len() != self.operands.len() {
            let text = format!("{} operands for a plan of {}", addresses.len(), self.operands.len());
            return Err(Failure { call: "execution", status: status::SUCCESS, text });
        }
        let pack = Descriptor::new(library, descriptor::VARIANT_PACK)?
            .all(attribute::PACK_UNIQUE_IDS, self.operands)?
            .addresses(attribute::PACK_DATA_POINTERS, addresses)?
            .addresses(attribute::PACK_WORKSPACE, &[workspace])?
            .finalise()?;
        // SAFETY: live descriptors and a handle of this thread; the caller vouches for the memory.
        let code = unsafe { (library.api.execute)(handle.as_raw(), self.plan.as_raw(), pack.as_raw()) };
        library.outcome("cudnnBackendExecute", code)
    }
}

/// A search for plans that can be built.
struct Search<'a> {
    library: &'static Library,
    graph: Graph,
    site: Site<'a>,
    rules: &'a Rules,
    parts: Arc<Parts>,
    tally: Tally,
    built: Vec<(Plan, Notes)>,
    wanted: usize,
}

impl Search<'_> {
    fn run(&mut self) {
        // Half precision without tensor cores is many times slower: only if nothing else works.
        let mut slow = Vec::new();
        for mode in [heuristics::A, heuristics::B, heuristics::FALLBACK] {
            let configurations = match self.configurations(mode) {
                Ok(configurations) => configurations,
                Err(failure) => {
                    self.tally.last_failure = Some(self.library.judge(failure).to_string());
                    continue;
                }
            };
            for configuration in configurations {
                let Some(candidate) = self.admit(configuration) else { continue };
                if self.graph.element().is_half() && !candidate.notes.uses_tensor_cores() {
                    slow.push(candidate);
                } else if self.try_build(candidate) {
                    return;
                }
            }
        }
        if self.built.is_empty() {
            slow.into_iter().any(|candidate| self.try_build(candidate));
        }
    }

    /// Configurations of one heuristic, best first in its opinion.
    fn configurations(&self, mode: i32) -> Result<Vec<Finalised>, Failure> {
        let lock = (mode == heuristics::B).then(|| MODE_B.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let heuristics = self
            .site
            .heuristics(self.library)?
            .descriptors(attribute::HEURISTICS_OPERATION_GRAPH, &[&self.parts.0])?
            .one(attribute::HEURISTICS_MODE, HeuristicsMode(mode))?
            .finalise()?;
        drop(lock);
        heuristics.read_descriptors(attribute::HEURISTICS_RESULTS, descriptor::ENGINE_CONFIG)
    }

    /// A configuration that the rules allow; others are tallied.
    fn admit(&mut self, configuration: Finalised) -> Option<Candidate> {
        match self.inspect(&configuration) {
            Ok((notes, workspace)) => {
                let verdict = self
                    .rules
                    .admit(self.graph.element(), &notes)
                    .and_then(|()| workspace.map_or(Ok(()), |bytes| self.rules.admit_workspace(bytes)));
                verdict.map_err(|objection| self.tally.add(objection)).ok()?;
                Some(Candidate { configuration, notes })
            }
            Err(failure) => {
                self.tally.add(Objection::NotBuilt);
                self.tally.last_failure = Some(failure.to_string());
                None
            }
        }
    }

    /// Notes of a configuration's engine, and the workspace where it is known already.
    fn inspect(&self, configuration: &Finalised) -> Result<(Notes, Option<u64>), Failure> {
        let engine = configuration.read_descriptor(attribute::CONFIG_ENGINE, descriptor::ENGINE)?;
        let numerical: Vec<NumericalNote> = engine.read_notes(attribute::ENGINE_NUMERICAL_NOTE)?;
        let behavior: Vec<BehaviorNote> = engine.read_notes(attribute::ENGINE_BEHAVIOR_NOTE)?;
        let notes = Notes {
            numerical: numerical.into_iter().map(|note| note.0).collect(),
            behavior: behavior.into_iter().map(|note| note.0).collect(),
        };
        let workspace = if self.library.version() >= WORKSPACE_OF_CONFIGURATION {
            u64::try_from(configuration.read_integer(attribute::CONFIG_WORKSPACE_SIZE)?).ok()
        } else {
            None
        };
        Ok((notes, workspace))
    }

    /// Builds a candidate if there is need of it. Whether the search is over.
    fn try_build(&mut self, candidate: Candidate) -> bool {
        let compiled = candidate.notes.is_run_time_compiled();
        if self.wanted > 1 && compiled {
            let already = self.built.iter().filter(|(_, notes)| notes.is_run_time_compiled()).count();
            if already >= TIMED_RUN_TIME_COMPILED {
                return false;
            }
        }
        let notes = candidate.notes.clone();
        match self.build(candidate) {
            // Before version 9.2 the workspace is known only now.
            Ok(plan) => match self.rules.admit_workspace(plan.workspace) {
                Ok(()) => self.built.push((plan, notes)),
                Err(objection) => self.tally.add(objection),
            },
            Err(failure) => {
                self.tally.add(Objection::NotBuilt);
                self.tally.last_failure = Some(failure.to_string());
            }
        }
        self.built.len() >= self.wanted
    }

    fn build(&self, candidate: Candidate) -> Result<Plan, Failure> {
        let plan = self
            .site
            .plan(self.library)?
            .descriptors(attribute::PLAN_ENGINE_CONFIG, &[&candidate.configuration])?
            .finalise()?;
        let parts = (self.parts.clone(), candidate.configuration);
        Plan::finished(plan, Some(parts), &self.graph)
    }
}

/// The engine in a plan's text, such as `eng10 STAGES=3 TILEK=0`.
fn engine_of(json: &str) -> Option<String> {
    let plan: serde_json::Value = serde_json::from_str(json).ok()?;
    let engine = plan.get("engine")?;
    let mut text = format!("eng{}", engine.get("engineId")?);
    for (knob, value) in engine.get("knobChoices").and_then(|knobs| knobs.as_object()).into_iter().flatten() {
        let knob = knob.strip_prefix("CUDNN_KNOB_TYPE_").unwrap_or(knob);
        // Writing to a string does not fail.
        let _ = write!(text, " {knob}={value}");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_with_their_settings() {
        let json = r#"{"engine":{"engineId":10,"knobChoices":{"CUDNN_KNOB_TYPE_STAGES":3,"CUDNN_KNOB_TYPE_TILEK":0}}}"#;
        assert_eq!(engine_of(json).as_deref(), Some("eng10 STAGES=3 TILEK=0"));
        assert_eq!(engine_of(r#"{"engine":{"engineId":7}}"#).as_deref(), Some("eng7"));
        assert_eq!(engine_of("{}"), None);
        assert_eq!(engine_of("no json"), None);
    }
}
