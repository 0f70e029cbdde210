//! Modules over the ops of this crate: parameters beside the call that uses them, nothing else. Names and shapes are
//! those of checkpoints, so a loader passes tensors through.

use candle_core::Tensor;

use crate::{
    conv::{ConvParams, ParityFilters, conv_nd, upsample_conv2d},
    error::Result,
    linear::{LinearWeight, linear},
};

/// A linear map with an optional bias: [`linear()`] with its parameters, whose weight may be quantised
/// ([`LinearWeight::from_quant`]).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::{LinearWeight, nn::Linear};
///
/// let weight = LinearWeight::from_tensor(Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?)?;
/// let layer = Linear::new(weight, Some(Tensor::new(&[10f32, 20.], &Device::Cpu)?));
/// let y = layer.forward(&Tensor::new(&[[1f32, 1.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[13., 27.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: LinearWeight,
    bias: Option<Tensor>,
}

impl Linear {
    /// From weight `[out_features, in_features]` and bias `[out_features]`; they are checked by the call.
    pub fn new(weight: LinearWeight, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// x `[.., in_features]` to `[.., out_features]` in x's dtype.
    ///
    /// # Errors
    /// Those of [`linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, self.bias.as_ref())
    }

    /// The matrix.
    pub fn weight(&self) -> &LinearWeight {
        &self.weight
    }

    /// The bias `[out_features]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

/// A convolution over `D` axes with an optional bias: [`conv_nd`] with its parameters.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{ConvParams, nn::Conv2d};
///
/// let weight = Tensor::zeros((8, 3, 3, 3), DType::F32, &Device::Cpu)?;
/// let params = ConvParams { stride: [2, 2], padding: [(0, 1), (0, 1)], ..Default::default() };
/// let layer = Conv2d::new(weight, None, params);
/// let y = layer.forward(&Tensor::zeros((1, 3, 16, 16), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [1, 8, 8, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Conv<const D: usize> {
    weight: Tensor,
    bias: Option<Tensor>,
    params: ConvParams<D>,
}

impl<const D: usize> Conv<D> {
    /// From weight `[K, C / groups, filter..]` and bias `[K]`; they are checked by the call.
    pub fn new(weight: Tensor, bias: Option<Tensor>, params: ConvParams<D>) -> Self {
        Self { weight, bias, params }
    }

    /// x `[N, C, spatial..]` to `[N, K, out..]` in x's dtype.
    ///
    /// # Errors
    /// Those of [`conv_nd`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        conv_nd(x, &self.weight, self.bias.as_ref(), &self.params)
    }

    /// The filters `[K, C / groups, filter..]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias `[K]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Stride, dilation, padding and groups.
    pub fn params(&self) -> &ConvParams<D> {
        &self.params
    }
}

/// A convolution over one axis.
pub type Conv1d = Conv<1>;
/// A convolution over two axes.
pub type Conv2d = Conv<2>;
/// A convolution over three axes.
pub type Conv3d = Conv<3>;

/// Nearest doubling and a 3 x 3 convolution with one zero around: [`upsample_conv2d`] with its parameters.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::nn::UpsampleConv2d;
///
/// let layer = UpsampleConv2d::new(&Tensor::zeros((8, 4, 3, 3), DType::F32, &Device::Cpu)?, None)?;
/// let y = layer.forward(&Tensor::zeros((1, 4, 5, 6), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [1, 8, 10, 12]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct UpsampleConv2d {
    filters: ParityFilters,
    bias: Option<Tensor>,
}

impl UpsampleConv2d {
    /// From weight `[K, C, 3, 3]` and bias `[K]`, which is checked by the call.
    ///
    /// # Errors
    /// Those of [`ParityFilters::new`].
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(Self { filters: ParityFilters::new(weight)?, bias })
    }

    /// x `[N, C, H, W]` to `[N, K, 2 H, 2 W]` in x's dtype.
    ///
    /// # Errors
    /// Those of [`upsample_conv2d`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        upsample_conv2d(x, &self.filters, self.bias.as_ref())
    }
}
