//! The part of cuDNN's C interface that this crate calls: the backend graph API of version 9, bound by hand so that no
//! version of the library is needed to build. Values are those of `cudnn_graph.h`.

use std::ffi::{c_char, c_int, c_void};

/// `cudnnStatus_t`.
pub(super) type Status = c_int;
/// `cudnnHandle_t`.
pub(super) type RawHandle = *mut c_void;
/// `cudnnBackendDescriptor_t`.
pub(super) type RawDescriptor = *mut c_void;
/// `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

/// Entry points. Valid for as long as the library is loaded, which is until the process ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Api {
    pub(super) get_version: unsafe extern "C" fn() -> usize,
    pub(super) get_max_device_version: unsafe extern "C" fn() -> usize,
    pub(super) get_cudart_version: unsafe extern "C" fn() -> usize,
    pub(super) graph_version_check: unsafe extern "C" fn() -> Status,
    pub(super) get_error_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(super) get_last_error_string: unsafe extern "C" fn(*mut c_char, usize),
    pub(super) create: unsafe extern "C" fn(*mut RawHandle) -> Status,
    pub(super) set_stream: unsafe extern "C" fn(RawHandle, RawStream) -> Status,
    pub(super) create_descriptor: unsafe extern "C" fn(c_int, *mut RawDescriptor) -> Status,
    pub(super) destroy_descriptor: unsafe extern "C" fn(RawDescriptor) -> Status,
    pub(super) set_attribute: unsafe extern "C" fn(RawDescriptor, c_int, c_int, i64, *const c_void) -> Status,
    pub(super) get_attribute: unsafe extern "C" fn(RawDescriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> Status,
    pub(super) finalize: unsafe extern "C" fn(RawDescriptor) -> Status,
    pub(super) execute: unsafe extern "C" fn(RawHandle, RawDescriptor, RawDescriptor) -> Status,
}

/// Statuses that are told apart; the rest by their thousands.
pub(super) mod status {
    use super::Status;

    pub(in crate::cudnn) const SUCCESS: Status = 0;
    /// Memory of the device is short: a state of the moment, not a property of the problem.
    pub(in crate::cudnn) const DEVICE_ALLOCATION_FAILED: Status = 4004;
}

/// `cudnnBackendAttributeType_t`.
pub(super) mod kind {
    pub(in crate::cudnn) const HANDLE: i32 = 0;
    pub(in crate::cudnn) const DATA_TYPE: i32 = 1;
    pub(in crate::cudnn) const BOOLEAN: i32 = 2;
    pub(in crate::cudnn) const INT64: i32 = 3;
    pub(in crate::cudnn) const FLOAT: i32 = 4;
    pub(in crate::cudnn) const VOID_PTR: i32 = 6;
    pub(in crate::cudnn) const CONVOLUTION_MODE: i32 = 7;
    pub(in crate::cudnn) const HEUR_MODE: i32 = 8;
    pub(in crate::cudnn) const NUMERICAL_NOTE: i32 = 11;
    pub(in crate::cudnn) const POINTWISE_MODE: i32 = 14;
    pub(in crate::cudnn) const BACKEND_DESCRIPTOR: i32 = 15;
    pub(in crate::cudnn) const REDUCTION_OPERATOR_TYPE: i32 = 18;
    pub(in crate::cudnn) const BEHAVIOR_NOTE: i32 = 19;
    pub(in crate::cudnn) const CHAR: i32 = 24;
}

/// `cudnnDataType_t`.
pub(super) mod data_type {
    pub(in crate::cudnn) const FLOAT: i32 = 0;
    pub(in crate::cudnn) const HALF: i32 = 2;
    pub(in crate::cudnn) const BFLOAT16: i32 = 9;
}

/// `cudnnBackendDescriptorType_t`.
pub(super) mod descriptor {
    pub(in crate::cudnn) const POINTWISE: i32 = 0;
    pub(in crate::cudnn) const CONVOLUTION: i32 = 1;
    pub(in crate::cudnn) const ENGINE: i32 = 2;
    pub(in crate::cudnn) const ENGINE_CONFIG: i32 = 3;
    pub(in crate::cudnn) const ENGINE_HEURISTICS: i32 = 4;
    pub(in crate::cudnn) const EXECUTION_PLAN: i32 = 5;
    pub(in crate::cudnn) const OPERATION_CONVOLUTION_FORWARD: i32 = 10;
    pub(in crate::cudnn) const OPERATION_POINTWISE: i32 = 13;
    pub(in crate::cudnn) const OPERATION_GRAPH: i32 = 15;
    pub(in crate::cudnn) const VARIANT_PACK: i32 = 16;
    pub(in crate::cudnn) const TENSOR: i32 = 17;
    pub(in crate::cudnn) const MATMUL: i32 = 18;
    pub(in crate::cudnn) const OPERATION_MATMUL: i32 = 19;
    pub(in crate::cudnn) const REDUCTION: i32 = 21;
    pub(in crate::cudnn) const OPERATION_REDUCTION: i32 = 22;
    #[cfg(test)]
    pub(in crate::cudnn) const DEVICE_PROPERTIES: i32 = 38;
    pub(in crate::cudnn) const OPERATION_SDPA_FORWARD: i32 = 41;
}

/// `cudnnBackendAttributeName_t`.
pub(super) mod attribute {
    pub(in crate::cudnn) const POINTWISE_MODE: i32 = 0;
    pub(in crate::cudnn) const POINTWISE_MATH_PRECISION: i32 = 1;
    pub(in crate::cudnn) const CONVOLUTION_COMPUTE_TYPE: i32 = 100;
    pub(in crate::cudnn) const CONVOLUTION_MODE: i32 = 101;
    pub(in crate::cudnn) const CONVOLUTION_DILATIONS: i32 = 102;
    pub(in crate::cudnn) const CONVOLUTION_FILTER_STRIDES: i32 = 103;
    pub(in crate::cudnn) const CONVOLUTION_POST_PADDINGS: i32 = 104;
    pub(in crate::cudnn) const CONVOLUTION_PRE_PADDINGS: i32 = 105;
    pub(in crate::cudnn) const CONVOLUTION_SPATIAL_DIMENSIONS: i32 = 106;
    pub(in crate::cudnn) const HEURISTICS_MODE: i32 = 200;
    pub(in crate::cudnn) const HEURISTICS_OPERATION_GRAPH: i32 = 201;
    pub(in crate::cudnn) const HEURISTICS_RESULTS: i32 = 202;
    #[cfg(test)]
    pub(in crate::cudnn) const HEURISTICS_DEVICE_PROPERTIES: i32 = 204;
    pub(in crate::cudnn) const CONFIG_ENGINE: i32 = 300;
    pub(in crate::cudnn) const CONFIG_WORKSPACE_SIZE: i32 = 303;
    pub(in crate::cudnn) const PLAN_HANDLE: i32 = 400;
    pub(in crate::cudnn) const PLAN_ENGINE_CONFIG: i32 = 401;
    pub(in crate::cudnn) const PLAN_WORKSPACE_SIZE: i32 = 402;
    pub(in crate::cudnn) const PLAN_JSON: i32 = 405;
    #[cfg(test)]
    pub(in crate::cudnn) const PLAN_DEVICE_PROPERTIES: i32 = 407;
    pub(in crate::cudnn) const FORWARD_ALPHA: i32 = 700;
    pub(in crate::cudnn) const FORWARD_BETA: i32 = 701;
    pub(in crate::cudnn) const FORWARD_CONVOLUTION: i32 = 702;
    pub(in crate::cudnn) const FORWARD_X: i32 = 704;
    pub(in crate::cudnn) const FORWARD_Y: i32 = 705;
    pub(in crate::cudnn) const FORWARD_W: i32 = 703;
    pub(in crate::cudnn) const POINTWISE_DESCRIPTOR: i32 = 750;
    pub(in crate::cudnn) const POINTWISE_X: i32 = 751;
    pub(in crate::cudnn) const POINTWISE_B: i32 = 752;
    pub(in crate::cudnn) const POINTWISE_Y: i32 = 753;
    pub(in crate::cudnn) const GRAPH_HANDLE: i32 = 800;
    pub(in crate::cudnn) const GRAPH_OPERATIONS: i32 = 801;
    pub(in crate::cudnn) const TENSOR_BYTE_ALIGNMENT: i32 = 900;
    pub(in crate::cudnn) const TENSOR_DATA_TYPE: i32 = 901;
    pub(in crate::cudnn) const TENSOR_DIMENSIONS: i32 = 902;
    pub(in crate::cudnn) const TENSOR_STRIDES: i32 = 903;
    pub(in crate::cudnn) const TENSOR_UNIQUE_ID: i32 = 906;
    pub(in crate::cudnn) const TENSOR_IS_VIRTUAL: i32 = 907;
    pub(in crate::cudnn) const TENSOR_IS_BY_VALUE: i32 = 908;
    pub(in crate::cudnn) const PACK_UNIQUE_IDS: i32 = 1000;
    pub(in crate::cudnn) const PACK_DATA_POINTERS: i32 = 1001;
    pub(in crate::cudnn) const PACK_WORKSPACE: i32 = 1003;
    pub(in crate::cudnn) const ENGINE_NUMERICAL_NOTE: i32 = 1303;
    pub(in crate::cudnn) const ENGINE_BEHAVIOR_NOTE: i32 = 1305;
    pub(in crate::cudnn) const MATMUL_COMPUTE_TYPE: i32 = 1500;
    pub(in crate::cudnn) const MATMUL_A: i32 = 1520;
    pub(in crate::cudnn) const MATMUL_B: i32 = 1521;
    pub(in crate::cudnn) const MATMUL_C: i32 = 1522;
    pub(in crate::cudnn) const MATMUL_DESCRIPTOR: i32 = 1523;
    pub(in crate::cudnn) const REDUCTION_OPERATOR: i32 = 1600;
    pub(in crate::cudnn) const REDUCTION_COMPUTE_TYPE: i32 = 1601;
    pub(in crate::cudnn) const REDUCTION_X: i32 = 1610;
    pub(in crate::cudnn) const REDUCTION_Y: i32 = 1611;
    pub(in crate::cudnn) const REDUCTION_DESCRIPTOR: i32 = 1612;
    #[cfg(test)]
    pub(in crate::cudnn) const DEVICE_PROPERTIES_JSON: i32 = 2702;
    pub(in crate::cudnn) const SDPA_FORWARD_Q: i32 = 2800;
    pub(in crate::cudnn) const SDPA_FORWARD_K: i32 = 2801;
    pub(in crate::cudnn) const SDPA_FORWARD_V: i32 = 2802;
    pub(in crate::cudnn) const SDPA_FORWARD_O: i32 = 2803;
    pub(in crate::cudnn) const SDPA_FORWARD_SCALE: i32 = 2805;
}

/// `cudnnPointwiseMode_t`.
pub(super) mod pointwise {
    pub(in crate::cudnn) const ADD: i32 = 0;
    pub(in crate::cudnn) const MUL: i32 = 1;
    pub(in crate::cudnn) const DIV: i32 = 6;
    pub(in crate::cudnn) const SUB: i32 = 9;
    pub(in crate::cudnn) const EXP: i32 = 13;
    pub(in crate::cudnn) const LOG: i32 = 15;
}

/// `cudnnReduceTensorOp_t`.
pub(super) mod reduction {
    pub(in crate::cudnn) const ADD: i32 = 0;
    pub(in crate::cudnn) const MAX: i32 = 3;
}

/// `cudnnConvolutionMode_t`: no flip of the filter.
pub(super) const CROSS_CORRELATION: i32 = 1;

/// `cudnnBackendHeurMode_t`.
pub(super) mod heuristics {
    pub(in crate::cudnn) const B: i32 = 1;
    pub(in crate::cudnn) const FALLBACK: i32 = 2;
    pub(in crate::cudnn) const A: i32 = 3;
}

/// `cudnnBackendNumericalNote_t`.
pub(super) mod numerical {
    pub(in crate::cudnn) const TENSOR_CORE: i32 = 0;
    pub(in crate::cudnn) const DOWN_CONVERT_INPUTS: i32 = 1;
    pub(in crate::cudnn) const REDUCED_PRECISION_REDUCTION: i32 = 2;
    pub(in crate::cudnn) const FFT: i32 = 3;
    pub(in crate::cudnn) const NONDETERMINISTIC: i32 = 4;
    pub(in crate::cudnn) const WINOGRAD: i32 = 5;
    pub(in crate::cudnn) const WINOGRAD_TILE_4X4: i32 = 6;
    pub(in crate::cudnn) const WINOGRAD_TILE_6X6: i32 = 7;
    pub(in crate::cudnn) const WINOGRAD_TILE_13X13: i32 = 8;
}

/// `cudnnBackendBehaviorNote_t`.
pub(super) mod behavior {
    pub(in crate::cudnn) const RUNTIME_COMPILATION: i32 = 0;
}
