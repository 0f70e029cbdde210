//! Problems as graphs of operations, and what their descriptions to the library share.

use std::fmt;

use super::{
    attention::AttentionSpec,
    convolution::ConvolutionSpec,
    descriptor::{Boolean, DataType, Descriptor, Finalised, PointwiseMode, ReductionOperator},
    library::Library,
    refusal::Failure,
    sys::{RawHandle, attribute, data_type, descriptor},
};

/// Alignment in bytes that every operand is declared to have, and must have: below 16 no fast kernel is offered.
pub(crate) const ALIGNMENT: u64 = 16;

/// Axes of a tensor at most: batch, channels, three of space.
pub(super) const AXES: usize = 5;

/// Element type of the operands and the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    pub(super) fn is_half(self) -> bool {
        self != Element::F32
    }

    pub(super) fn data_type(self) -> DataType {
        DataType(match self {
            Element::F32 => data_type::FLOAT,
            Element::F16 => data_type::HALF,
            Element::Bf16 => data_type::BFLOAT16,
        })
    }
}

/// Where the elements of a tensor lie: extents and strides (in elements) in the order that the operation names its axes,
/// whatever the order in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TensorSpec {
    pub(super) rank: usize,
    pub(super) dims: [i64; AXES],
    pub(super) strides: [i64; AXES],
}

impl TensorSpec {
    /// Extents and strides of up to five axes. `None` beyond that, or if a number does not fit.
    pub(crate) fn new(dims: &[usize], strides: &[usize]) -> Option<Self> {
        if dims.len() != strides.len() || dims.len() > AXES {
            return None;
        }
        let fixed = |values: &[usize]| -> Option<[i64; AXES]> {
            let mut fixed = [0; AXES];
            for (to, &from) in fixed.iter_mut().zip(values) {
                *to = i64::try_from(from).ok()?;
            }
            Some(fixed)
        };
        Some(Self { rank: dims.len(), dims: fixed(dims)?, strides: fixed(strides)? })
    }

    /// A packed row-major tensor.
    pub(super) fn packed(dims: &[i64]) -> Self {
        let mut spec = Self { rank: dims.len(), dims: [0; AXES], strides: [0; AXES] };
        let mut next = 1;
        for (axis, &extent) in dims.iter().enumerate().rev() {
            (spec.dims[axis], spec.strides[axis]) = (extent, next);
            next *= extent;
        }
        spec
    }

    /// With the last two axes exchanged: the same elements at the same places.
    pub(super) fn transposed(mut self) -> Self {
        if let Some(last) = self.rank.checked_sub(2) {
            self.dims.swap(last, last + 1);
            self.strides.swap(last, last + 1);
        }
        self
    }

    pub(super) fn dims(&self) -> &[i64] {
        &self.dims[..self.rank]
    }

    pub(super) fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }
}

impl fmt::Debug for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{:?}", self.dims(), self.strides())
    }
}

/// A problem: pure data, on which its plan depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Graph {
    /// A convolution with its epilogue.
    Convolution(ConvolutionSpec),
    /// Attention.
    Attention(AttentionSpec),
}

impl From<&ConvolutionSpec> for Graph {
    fn from(spec: &ConvolutionSpec) -> Self {
        Graph::Convolution(*spec)
    }
}

impl From<&AttentionSpec> for Graph {
    fn from(spec: &AttentionSpec) -> Self {
        Graph::Attention(*spec)
    }
}

impl Graph {
    pub(super) fn element(&self) -> Element {
        match self {
            Graph::Convolution(spec) => spec.element,
            Graph::Attention(spec) => spec.element,
        }
    }

    /// Ids of the tensors that an execution is given, in its order.
    pub(super) fn operands(&self) -> &'static [i64] {
        match self {
            Graph::Convolution(spec) => spec.operands(),
            Graph::Attention(spec) => spec.operands(),
        }
    }

    /// Everything on which a plan depends, as one line: the key of plans on disk.
    pub(super) fn key(&self) -> String {
        match self {
            Graph::Convolution(spec) => spec.key(),
            Graph::Attention(spec) => spec.key(),
        }
    }

    /// Whether the library has no kernels for it but those that it compiles at run time.
    pub(super) fn is_compiled_at_run_time(&self) -> bool {
        matches!(self, Graph::Attention(_))
    }

    /// Describes the graph to the library. `handle` may be left out from version 9.8 on.
    ///
    /// The second value is what the graph refers to; it has to live as long.
    pub(super) fn describe(
        &self,
        library: &'static Library,
        handle: Option<RawHandle>,
    ) -> Result<(Finalised, Vec<Finalised>), Failure> {
        match self {
            Graph::Convolution(spec) => spec.describe(library, handle),
            Graph::Attention(spec) => spec.describe(library, handle),
        }
    }
}

/// Describes tensors and operations of graphs.
pub(super) struct Describer {
    pub(super) library: &'static Library,
    /// Type of the tensors in memory.
    pub(super) element: Element,
}

impl Describer {
    /// An operand or a result.
    pub(super) fn tensor(&self, id: i64, spec: &TensorSpec) -> Result<Finalised, Failure> {
        self.started(id, spec, self.element.data_type())?.finalise()
    }

    /// A result in f32.
    pub(super) fn wide_tensor(&self, id: i64, spec: &TensorSpec) -> Result<Finalised, Failure> {
        self.started(id, spec, DataType(data_type::FLOAT))?.finalise()
    }

    /// An f32 that an execution reads from the host's memory, for tensors of `rank` axes.
    pub(super) fn scalar(&self, id: i64, rank: usize) -> Result<Finalised, Failure> {
        let one = TensorSpec::packed(&[1; AXES][..rank]);
        let scalar = self.started(id, &one, DataType(data_type::FLOAT))?;
        scalar.one(attribute::TENSOR_IS_BY_VALUE, Boolean::TRUE)?.finalise()
    }

    /// A value that never reaches memory, in f32.
    pub(super) fn intermediate(&self, id: i64, spec: &TensorSpec) -> Result<Finalised, Failure> {
        let tensor = self.started(id, spec, DataType(data_type::FLOAT))?;
        tensor.one(attribute::TENSOR_IS_VIRTUAL, Boolean::TRUE)?.finalise()
    }

    /// The same in the type of the operands.
    pub(super) fn narrow_intermediate(&self, id: i64, spec: &TensorSpec) -> Result<Finalised, Failure> {
        let tensor = self.started(id, spec, self.element.data_type())?;
        tensor.one(attribute::TENSOR_IS_VIRTUAL, Boolean::TRUE)?.finalise()
    }

    fn started(&self, id: i64, spec: &TensorSpec, of: DataType) -> Result<Descriptor, Failure> {
        Descriptor::new(self.library, descriptor::TENSOR)?
            .one(attribute::TENSOR_DATA_TYPE, of)?
            .all(attribute::TENSOR_DIMENSIONS, spec.dims())?
            .all(attribute::TENSOR_STRIDES, spec.strides())?
            .one(attribute::TENSOR_UNIQUE_ID, id)?
            .one(attribute::TENSOR_BYTE_ALIGNMENT, ALIGNMENT as i64)
    }

    /// `into = mode(a, b)` in f32; `b` may have extents of 1 where `a` has not.
    pub(super) fn pointwise(
        &self,
        mode: i32,
        a: &Finalised,
        b: Option<&Finalised>,
        into: &Finalised,
        keep: &mut Vec<Finalised>,
    ) -> Result<Finalised, Failure> {
        let pointwise = Descriptor::new(self.library, descriptor::POINTWISE)?
            .one(attribute::POINTWISE_MODE, PointwiseMode(mode))?
            .one(attribute::POINTWISE_MATH_PRECISION, DataType(data_type::FLOAT))?
            .finalise()?;
        let mut operation = Descriptor::new(self.library, descriptor::OPERATION_POINTWISE)?
            .descriptors(attribute::POINTWISE_DESCRIPTOR, &[&pointwise])?
            .descriptors(attribute::POINTWISE_X, &[a])?
            .descriptors(attribute::POINTWISE_Y, &[into])?;
        if let Some(b) = b {
            operation = operation.descriptors(attribute::POINTWISE_B, &[b])?;
        }
        keep.push(pointwise);
        operation.finalise()
    }

    /// `into` = the reduction of `x` along the axes of which `into` has an extent of 1, in f32.
    pub(super) fn reduce(
        &self,
        operator: i32,
        x: &Finalised,
        into: &Finalised,
        keep: &mut Vec<Finalised>,
    ) -> Result<Finalised, Failure> {
        let reduction = Descriptor::new(self.library, descriptor::REDUCTION)?
            .one(attribute::REDUCTION_OPERATOR, ReductionOperator(operator))?
            .one(attribute::REDUCTION_COMPUTE_TYPE, DataType(data_type::FLOAT))?
            .finalise()?;
        let operation = Descriptor::new(self.library, descriptor::OPERATION_REDUCTION)?
            .descriptors(attribute::REDUCTION_X, &[x])?
            .descriptors(attribute::REDUCTION_Y, &[into])?
            .descriptors(attribute::REDUCTION_DESCRIPTOR, &[&reduction])?
            .finalise();
        keep.push(reduction);
        operation
    }

    /// `into = a b` for the matrices of the last two axes, with f32 sums.
    pub(super) fn multiply(
        &self,
        a: &Finalised,
        b: &Finalised,
        into: &Finalised,
        keep: &mut Vec<Finalised>,
    ) -> Result<Finalised, Failure> {
        let product = Descriptor::new(self.library, descriptor::MATMUL)?
            .one(attribute::MATMUL_COMPUTE_TYPE, DataType(data_type::FLOAT))?
            .finalise()?;
        let operation = Descriptor::new(self.library, descriptor::OPERATION_MATMUL)?
            .descriptors(attribute::MATMUL_A, &[a])?
            .descriptors(attribute::MATMUL_B, &[b])?
            .descriptors(attribute::MATMUL_C, &[into])?
            .descriptors(attribute::MATMUL_DESCRIPTOR, &[&product])?
            .finalise();
        keep.push(product);
        operation
    }

    /// The graph of these operations.
    pub(super) fn graph(&self, operations: &[Finalised], handle: Option<RawHandle>) -> Result<Finalised, Failure> {
        let graph = Descriptor::new(self.library, descriptor::OPERATION_GRAPH)?
            .descriptors(attribute::GRAPH_OPERATIONS, &operations.iter().collect::<Vec<_>>())?;
        match handle {
            Some(handle) => graph.handle(attribute::GRAPH_HANDLE, handle)?.finalise(),
            None => graph.finalise(),
        }
    }
}
