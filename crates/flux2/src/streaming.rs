//! Blocks that lie on the host and visit the device one after another, each while its predecessor works.
//!
//! Two slots of device memory hold two streamed blocks. When all that uses a slot has been enqueued, the upload of the
//! block after the next begins beside it; so a model of any size runs in the memory of its largest part, as fast as
//! either the device computes or the host delivers. Results do not depend on where a block lies.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Tensor};
use candle_fork::{
    LinearWeight, What,
    stream::{HostBlock, Upload, Uploads},
};
use weights::{Expected, Loader};

use crate::{error::Result, parts::Parts, plan::join};

/// Slots of device memory: one in use, one being filled.
const SLOTS: usize = 2;

/// Elements that tensors of a slot begin at multiples of: 256 bytes of half precision.
const ALIGNMENT: usize = 128;

/// Where the tensors of a block lie in a slot.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct BlockLayout {
    /// Name below the block's prefix, first element, shape.
    tensors: Vec<(String, usize, Vec<usize>)>,
    elements: usize,
}

impl BlockLayout {
    /// Tensors of a block in the order of `list`, whose names are below the block's prefix. Matrices that a block stacks
    /// must be neighbours there, in their order; vectors are aligned, matrices follow one another.
    pub(crate) fn new(list: &[Expected]) -> Self {
        let mut layout = Self::default();
        for Expected { name, shape } in list {
            let previous_is_matrix = layout.tensors.last().is_some_and(|(_, _, shape)| shape.len() == 2);
            if shape.len() != 2 || !previous_is_matrix {
                layout.elements = layout.elements.next_multiple_of(ALIGNMENT);
            }
            layout.tensors.push((name.clone(), layout.elements, shape.clone()));
            layout.elements += shape.iter().product::<usize>();
        }
        layout.elements = layout.elements.next_multiple_of(ALIGNMENT);
        layout
    }

    /// Elements of a slot.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// The tensors below `prefix` of a loader for the CPU, as one block of `elements` for uploads to `device`.
    fn gather(&self, loader: &mut Loader, prefix: &str, elements: usize, device: &Device) -> Result<HostBlock> {
        let mut parts = Vec::new();
        let mut end = 0;
        for (name, start, shape) in &self.tensors {
            let tensor = loader.tensor(&join(prefix, name))?.flatten_all().what("streamed tensor")?;
            if *start > end {
                parts.push(gap(start - end, tensor.dtype())?);
            }
            end = start + shape.iter().product::<usize>();
            parts.push(tensor);
        }
        if elements > end
            && let Some(dtype) = parts.last().map(Tensor::dtype)
        {
            parts.push(gap(elements - end, dtype)?);
        }
        Ok(HostBlock::new(&Tensor::cat(&parts, 0).what("streamed block")?, device)?)
    }
}

fn gap(elements: usize, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::zeros(elements, dtype, &Device::Cpu).what("gap of a streamed block")?)
}

/// A block's tensors as views of a slot.
pub(crate) struct SlotParts<'a> {
    slot: &'a Tensor,
    layout: &'a BlockLayout,
}

impl SlotParts<'_> {
    fn find(&self, name: &str) -> Result<(usize, &[usize])> {
        let found = self.layout.tensors.iter().find(|(own, _, _)| own == name);
        let (_, start, shape) = found.ok_or_else(|| weights::Error::NotPlanned {
            file: "a streamed block".to_owned(),
            tensor: name.to_owned(),
            problem: "outside the plan",
        })?;
        Ok((*start, shape))
    }

    fn view(&self, start: usize, shape: &[usize]) -> Result<Tensor> {
        let elements = shape.iter().product();
        Ok(self.slot.narrow(0, start, elements).and_then(|t| t.reshape(shape)).what("view of a slot")?)
    }
}

impl Parts for SlotParts<'_> {
    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let (start, shape) = self.find(name)?;
        self.view(start, shape)
    }

    fn linear_stack(&mut self, names: &[&str]) -> Result<LinearWeight> {
        let mut parts = Vec::new();
        let mut run: Option<(usize, usize, usize)> = None;
        for name in names {
            let (start, shape) = self.find(name)?;
            let &[rows, columns] = shape else { return Ok(LinearWeight::from_tensor(self.view(start, shape)?)?) };
            run = match run {
                // Neighbours of the same width are one matrix.
                Some((first, height, width)) if first + height * width == start && width == columns => {
                    Some((first, height + rows, width))
                }
                other => {
                    parts.extend(other);
                    Some((start, rows, columns))
                }
            };
        }
        parts.extend(run);
        let weights = parts
            .into_iter()
            .map(|(start, rows, columns)| Ok(LinearWeight::from_tensor(self.view(start, &[rows, columns])?)?));
        Ok(LinearWeight::stack(weights.collect::<Result<_>>()?)?)
    }
}

/// Host blocks of a model that is dropped and loaded again: to copy them into page-locked memory takes many times as long as
/// to upload them, so those that are needed again stay.
#[derive(Debug, Default)]
pub(crate) struct HostBlocks {
    /// By prefix and elements.
    kept: Mutex<HashMap<(String, usize), Arc<HostBlock>>>,
}

impl HostBlocks {
    /// The block, if it is kept; else what `make` gives.
    fn get(&self, prefix: &str, elements: usize, make: impl FnOnce() -> Result<HostBlock>) -> Result<Arc<HostBlock>> {
        // A panic while the lock is held cannot leave the map half-made, so a poisoned lock is still good.
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (prefix.to_owned(), elements);
        if let Some(block) = kept().get(&key) {
            return Ok(block.clone());
        }
        let block = Arc::new(make()?);
        kept().insert(key, block.clone());
        Ok(block)
    }

    /// Lets go of all blocks but those that are in use.
    pub(crate) fn prune(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|_, block| Arc::strong_count(block) > 1);
    }
}

/// Host blocks of a model in the order in which a pass uses them, and the slots that they visit.
#[derive(Debug)]
pub(crate) struct Streamer {
    host: Vec<Arc<HostBlock>>,
    slots: [Tensor; SLOTS],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    uploads: Uploads,
    /// Uploads that have been started and not waited for, oldest first.
    pending: VecDeque<Upload>,
    /// Blocks that have arrived so far; the next one is this modulo their number, in slot this modulo [`SLOTS`].
    arrived: usize,
}

impl Streamer {
    /// Slots for blocks of at most `elements`.
    pub(crate) fn new(elements: usize, dtype: DType, device: &Device) -> Result<Self> {
        let slot = || Tensor::zeros(elements, dtype, device).what("slot for streamed blocks");
        let state = State { uploads: Uploads::new(device)?, pending: VecDeque::new(), arrived: 0 };
        Ok(Self { host: Vec::new(), slots: [slot()?, slot()?], state: Mutex::new(state) })
    }

    /// A block's weights as those of each slot.
    pub(crate) fn blocks<B>(
        &self,
        layout: &BlockLayout,
        mut build: impl FnMut(&mut SlotParts<'_>) -> Result<B>,
    ) -> Result<[B; SLOTS]> {
        let mut at = |index: usize| build(&mut SlotParts { slot: &self.slots[index], layout });
        Ok([at(0)?, at(1)?])
    }

    /// Adds the next block of a pass: one of `kept`, or from a loader for the CPU.
    pub(crate) fn push(
        &mut self,
        kept: &HostBlocks,
        loader: &mut Loader,
        prefix: &str,
        layout: &BlockLayout,
    ) -> Result<()> {
        let [slot, _] = &self.slots;
        let elements = slot.elem_count();
        self.host.push(kept.get(prefix, elements, || layout.gather(loader, prefix, elements, slot.device()))?);
        Ok(())
    }

    /// Begins a pass over all blocks. Other passes wait for its end.
    pub(crate) fn begin(&self) -> Result<Pass<'_>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.arrived.is_multiple_of(self.host.len().max(1)) {
            // The last pass was stopped on its way.
            state.pending.clear();
            state.arrived = 0;
        }
        let mut pass = Pass { streamer: self, state };
        while pass.state.pending.len() < SLOTS {
            pass.start()?;
        }
        Ok(pass)
    }
}

/// A pass over the streamed blocks.
pub(crate) struct Pass<'a> {
    streamer: &'a Streamer,
    state: MutexGuard<'a, State>,
}

impl Pass<'_> {
    /// Starts the upload behind those that are pending.
    fn start(&mut self) -> Result<()> {
        let Streamer { host, slots, .. } = self.streamer;
        let index = self.state.arrived + self.state.pending.len();
        let upload = self.state.uploads.start(&host[index % host.len()], &slots[index % SLOTS])?;
        self.state.pending.push_back(upload);
        Ok(())
    }

    /// Lets the device wait for the next block; gives the slot that it is in, for `run` to enqueue all that uses it.
    pub(crate) fn visit<R>(&mut self, run: impl FnOnce(usize) -> Result<R>) -> Result<R> {
        if let Some(upload) = self.state.pending.pop_front() {
            upload.wait()?;
        }
        let slot = self.state.arrived % SLOTS;
        let result = run(slot);
        self.state.arrived += 1;
        // Also behind a failure, so that the number of pending uploads stays right.
        self.start()?;
        result
    }
}

/// Blocks of one kind: on the device, or in its slots in turn.
#[derive(Debug)]
pub(crate) struct Blocks<B> {
    places: Vec<Place<B>>,
    slots: Option<[B; SLOTS]>,
}

#[derive(Debug)]
enum Place<B> {
    Resident(B),
    Streamed,
}

impl<B> Blocks<B> {
    /// All of them on the device.
    pub(crate) fn resident(blocks: Vec<B>) -> Self {
        Self { places: blocks.into_iter().map(Place::Resident).collect(), slots: None }
    }

    /// None yet, and no slots.
    pub(crate) fn empty() -> Self {
        Self::resident(Vec::new())
    }

    /// `slots` serve the blocks that are pushed as streamed.
    pub(crate) fn streamed(slots: [B; SLOTS]) -> Self {
        Self { places: Vec::new(), slots: Some(slots) }
    }

    /// Adds a block on the device; `None` is one that the streamer has been given.
    pub(crate) fn push(&mut self, block: Option<B>) {
        self.places.push(block.map_or(Place::Streamed, Place::Resident));
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Calls `run` with block `index`, which `pass` brings if it is streamed.
    pub(crate) fn with<R>(
        &self,
        index: usize,
        pass: &mut Option<Pass<'_>>,
        run: impl FnOnce(&B) -> Result<R>,
    ) -> Result<R> {
        match (&self.places[index], &self.slots, pass) {
            (Place::Resident(block), _, _) => run(block),
            (Place::Streamed, Some(slots), Some(pass)) => pass.visit(|slot| run(&slots[slot])),
            (Place::Streamed, ..) => unreachable!("streamed blocks come with slots and a pass"),
        }
    }
}

/// Whether block `index` of `count` is streamed when `streamed` of them are: evenly spread, so that uploads run beside
/// blocks that need none.
pub(crate) fn is_streamed(index: usize, count: usize, streamed: usize) -> bool {
    (index + 1) * streamed / count > index * streamed / count
}

/// A shared streamer, where there is one.
pub(crate) fn begin(streamer: &Option<Arc<Streamer>>) -> Result<Option<Pass<'_>>> {
    streamer.as_deref().map(Streamer::begin).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_blocks_are_spread_evenly() {
        for count in [1, 5, 20, 24] {
            for streamed in 0..=count {
                let places: Vec<_> = (0..count).map(|i| is_streamed(i, count, streamed)).collect();
                assert_eq!(places.iter().filter(|&&s| s).count(), streamed, "{count} {streamed}");
                if streamed * 2 <= count {
                    assert!(!places.windows(2).any(|pair| pair[0] && pair[1]), "{count} {streamed}: {places:?}");
                }
            }
        }
    }

    #[test]
    fn host_blocks_are_made_once_and_kept_while_they_are_used() {
        let kept = HostBlocks::default();
        let made = std::cell::Cell::new(0);
        let get = |prefix: &str, elements: usize| {
            let make = || {
                made.set(made.get() + 1);
                let zeros = Tensor::zeros(elements, DType::F32, &Device::Cpu).what("test")?;
                Ok(HostBlock::new(&zeros, &Device::Cpu)?)
            };
            kept.get(prefix, elements, make).unwrap()
        };
        let a = get("a", 4);
        assert!(Arc::ptr_eq(&a, &get("a", 4)));
        get("a", 5);
        get("b", 4);
        assert_eq!(made.get(), 3);
        kept.prune();
        assert!(Arc::ptr_eq(&a, &get("a", 4)));
        assert_eq!(made.get(), 3);
        get("b", 4);
        assert_eq!(made.get(), 4);
    }

    #[test]
    fn stacked_matrices_are_neighbours_and_vectors_aligned() {
        let list = [
            Expected::new("q".to_owned(), [2, 3]),
            Expected::new("k".to_owned(), [2, 3]),
            Expected::new("norm".to_owned(), [5]),
            Expected::new("out".to_owned(), [4, 2]),
        ];
        let layout = BlockLayout::new(&list);
        let starts: Vec<_> = layout.tensors.iter().map(|(_, start, _)| *start).collect();
        assert_eq!(starts, [0, 6, 128, 256]);
        assert_eq!(layout.elements(), 384);

        let slot = Tensor::arange(0f32, 384.0, &Device::Cpu).unwrap();
        let mut parts = SlotParts { slot: &slot, layout: &layout };
        let qk = parts.linear_stack(&["q", "k"]).unwrap();
        assert_eq!((qk.out_features(), qk.in_features()), (4, 3));
        assert_eq!(parts.tensor("norm").unwrap().to_vec1::<f32>().unwrap(), [128.0, 129.0, 130.0, 131.0, 132.0]);
        assert!(parts.tensor("v").is_err());
    }
}
