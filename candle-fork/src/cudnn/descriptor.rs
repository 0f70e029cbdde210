//! Descriptors of the graph API: owned, typed, and of two kinds. One that is being described belongs to one thread; once
//! finalised it never changes again.

use std::{ffi::c_void, mem::MaybeUninit, ptr, ptr::NonNull};

use super::{
    library::Library,
    refusal::Failure,
    sys::{RawDescriptor, RawHandle, kind},
};

/// Attribute values of a fixed type in cuDNN's sense.
///
/// # Safety
/// The type is what `cudnnBackendSetAttribute` and `cudnnBackendGetAttribute` read and write for [`Self::KIND`], and any
/// bits that the library writes are a value of it.
pub(super) unsafe trait Attribute: Copy {
    /// `cudnnBackendAttributeType_t`.
    const KIND: i32;
}

// SAFETY: CUDNN_TYPE_INT64 is int64_t.
unsafe impl Attribute for i64 {
    const KIND: i32 = kind::INT64;
}

// SAFETY: CUDNN_TYPE_FLOAT is float.
unsafe impl Attribute for f32 {
    const KIND: i32 = kind::FLOAT;
}

/// A truth value: one byte, 0 or 1.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Boolean(u8);

impl Boolean {
    pub(super) const TRUE: Self = Self(1);
}

// SAFETY: CUDNN_TYPE_BOOLEAN is one byte, of which all bits are values here.
unsafe impl Attribute for Boolean {
    const KIND: i32 = kind::BOOLEAN;
}

// SAFETY: CUDNN_TYPE_CHAR is char, of which all bits are values.
unsafe impl Attribute for u8 {
    const KIND: i32 = kind::CHAR;
}

// SAFETY: CUDNN_TYPE_VOID_PTR is void*.
unsafe impl Attribute for *mut c_void {
    const KIND: i32 = kind::VOID_PTR;
}

/// C enums, each with its own type of attribute.
macro_rules! enums {
    ($($(#[$doc:meta])* $name:ident = $kind:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) i32);

        // SAFETY: the enums of the graph API have the size of int, and all bits are values here.
        unsafe impl Attribute for $name {
            const KIND: i32 = kind::$kind;
        }
    )*};
}

enums! {
    /// `cudnnDataType_t`.
    DataType = DATA_TYPE;
    /// `cudnnConvolutionMode_t`.
    ConvolutionMode = CONVOLUTION_MODE;
    /// `cudnnPointwiseMode_t`.
    PointwiseMode = POINTWISE_MODE;
    /// `cudnnReduceTensorOp_t`.
    ReductionOperator = REDUCTION_OPERATOR_TYPE;
    /// `cudnnBackendHeurMode_t`.
    HeuristicsMode = HEUR_MODE;
    /// `cudnnBackendNumericalNote_t`.
    NumericalNote = NUMERICAL_NOTE;
    /// `cudnnBackendBehaviorNote_t`.
    BehaviorNote = BEHAVIOR_NOTE;
}

/// A descriptor under construction.
#[derive(Debug)]
pub(super) struct Descriptor {
    library: &'static Library,
    raw: NonNull<c_void>,
}

impl Descriptor {
    /// An empty descriptor of a `cudnnBackendDescriptorType_t`.
    pub(super) fn new(library: &'static Library, of: i32) -> Result<Self, Failure> {
        let mut raw: RawDescriptor = ptr::null_mut();
        // SAFETY: writes one pointer to a place for one.
        let code = unsafe { (library.api.create_descriptor)(of, &mut raw) };
        library.outcome("cudnnBackendCreateDescriptor", code)?;
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { library, raw }),
            None => Err(Failure {
                call: "cudnnBackendCreateDescriptor",
                status: code,
                text: "success, but no descriptor".to_owned(),
            }),
        }
    }

    /// Values of an attribute.
    pub(super) fn all<T: Attribute>(self, name: i32, values: &[T]) -> Result<Self, Failure> {
        // At most a few kilobytes: fits.
        let count = values.len() as i64;
        // SAFETY: `values` are that many elements of the type that `KIND` promises; the library copies them.
        let code = unsafe {
            (self.library.api.set_attribute)(self.raw.as_ptr(), name, T::KIND, count, values.as_ptr().cast())
        };
        self.library.outcome("cudnnBackendSetAttribute", code)?;
        Ok(self)
    }

    /// The value of an attribute that has one.
    pub(super) fn one<T: Attribute>(self, name: i32, value: T) -> Result<Self, Failure> {
        self.all(name, &[value])
    }

    /// A text, without an end mark.
    pub(super) fn text(self, name: i32, value: &str) -> Result<Self, Failure> {
        self.all(name, value.as_bytes())
    }

    /// Addresses on the device; the library stores them and follows them only when it executes.
    pub(super) fn addresses(self, name: i32, values: &[u64]) -> Result<Self, Failure> {
        let pointers: Vec<*mut c_void> = values.iter().map(|&address| address as usize as *mut c_void).collect();
        self.all(name, &pointers)
    }

    /// Finalised descriptors, which the caller keeps alive for as long as this one.
    pub(super) fn descriptors(self, name: i32, values: &[&Finalised]) -> Result<Self, Failure> {
        let raw: Vec<RawDescriptor> = values.iter().map(|value| value.0.raw.as_ptr()).collect();
        self.pointers_of_kind(name, kind::BACKEND_DESCRIPTOR, &raw)
    }

    /// A handle.
    pub(super) fn handle(self, name: i32, value: RawHandle) -> Result<Self, Failure> {
        self.pointers_of_kind(name, kind::HANDLE, &[value])
    }

    fn pointers_of_kind(self, name: i32, kind: i32, values: &[*mut c_void]) -> Result<Self, Failure> {
        let count = values.len() as i64;
        // SAFETY: handles and descriptors are passed as an array of pointers; these are live ones of this library.
        let code =
            unsafe { (self.library.api.set_attribute)(self.raw.as_ptr(), name, kind, count, values.as_ptr().cast()) };
        self.library.outcome("cudnnBackendSetAttribute", code)?;
        Ok(self)
    }

    /// Checks the description and closes it.
    pub(super) fn finalise(self) -> Result<Finalised, Failure> {
        // SAFETY: a live descriptor, described by this thread alone.
        let code = unsafe { (self.library.api.finalize)(self.raw.as_ptr()) };
        self.library.outcome("cudnnBackendFinalize", code)?;
        Ok(Finalised(self))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: live until here, and nobody else's. A failure leaves nothing to be done.
        let _ = unsafe { (self.library.api.destroy_descriptor)(self.raw.as_ptr()) };
    }
}

/// A descriptor that cannot change any more.
#[derive(Debug)]
pub(super) struct Finalised(Descriptor);

// SAFETY: the library does not tie descriptors to the thread that made them.
unsafe impl Send for Finalised {}
// SAFETY: finalised descriptors are immutable; reading an attribute of one changes nothing in it.
unsafe impl Sync for Finalised {}

impl Finalised {
    pub(super) fn as_raw(&self) -> RawDescriptor {
        self.0.raw.as_ptr()
    }

    /// How many values an attribute has.
    fn count<T: Attribute>(&self, name: i32) -> Result<usize, Failure> {
        self.count_of_kind(name, T::KIND)
    }

    fn count_of_kind(&self, name: i32, kind: i32) -> Result<usize, Failure> {
        let mut count = 0;
        // SAFETY: asked for no values, the library writes the count only.
        let code =
            unsafe { (self.0.library.api.get_attribute)(self.as_raw(), name, kind, 0, &mut count, ptr::null_mut()) };
        self.0.library.outcome("cudnnBackendGetAttribute", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// At most `room` values of an attribute.
    fn get<T: Attribute>(&self, name: i32, room: usize) -> Result<Vec<T>, Failure> {
        let mut values: Vec<MaybeUninit<T>> = (0..room).map(|_| MaybeUninit::zeroed()).collect();
        let mut count = 0;
        // SAFETY: writes at most `room` values of the type that `KIND` promises to memory for that many.
        let code = unsafe {
            (self.0.library.api.get_attribute)(
                self.as_raw(),
                name,
                T::KIND,
                room as i64,
                &mut count,
                values.as_mut_ptr().cast(),
            )
        };
        self.0.library.outcome("cudnnBackendGetAttribute", code)?;
        // The count may be that of all values there are.
        values.truncate(usize::try_from(count).unwrap_or(0));
        // SAFETY: zeroed at first, then written by the library: all bits are values of an `Attribute`.
        Ok(values.into_iter().map(|value| unsafe { value.assume_init() }).collect())
    }

    /// One integer.
    pub(super) fn read_integer(&self, name: i32) -> Result<i64, Failure> {
        Ok(self.get(name, 1)?.first().copied().unwrap_or(0))
    }

    /// The values of a short list.
    pub(super) fn read_notes<T: Attribute>(&self, name: i32) -> Result<Vec<T>, Failure> {
        /// More notes than there are.
        const ROOM: usize = 32;
        self.get(name, ROOM)
    }

    /// A text.
    pub(super) fn read_text(&self, name: i32) -> Result<String, Failure> {
        let mut bytes = self.get::<u8>(name, self.count::<u8>(name)?)?;
        if bytes.last() == Some(&0) {
            bytes.pop();
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The descriptors that an attribute lists, as new ones of `of`; they come finalised.
    pub(super) fn read_descriptors(&self, name: i32, of: i32) -> Result<Vec<Finalised>, Failure> {
        let room = self.count_of_kind(name, kind::BACKEND_DESCRIPTOR)?;
        self.read_some_descriptors(name, of, room)
    }

    /// The one descriptor that an attribute holds.
    pub(super) fn read_descriptor(&self, name: i32, of: i32) -> Result<Finalised, Failure> {
        self.read_some_descriptors(name, of, 1)?.pop().ok_or_else(|| Failure {
            call: "cudnnBackendGetAttribute",
            status: 0,
            text: format!("success, but no descriptor for attribute {name}"),
        })
    }

    fn read_some_descriptors(&self, name: i32, of: i32, room: usize) -> Result<Vec<Finalised>, Failure> {
        let library = self.0.library;
        let mut filled = (0..room).map(|_| Descriptor::new(library, of)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<RawDescriptor> = filled.iter().map(|descriptor| descriptor.raw.as_ptr()).collect();
        let mut count = 0;
        // SAFETY: reads `room` live descriptors of the type that the attribute holds, and fills them.
        let code = unsafe {
            (library.api.get_attribute)(
                self.as_raw(),
                name,
                kind::BACKEND_DESCRIPTOR,
                room as i64,
                &mut count,
                raw.as_mut_ptr().cast(),
            )
        };
        library.outcome("cudnnBackendGetAttribute", code)?;
        filled.truncate(usize::try_from(count).unwrap_or(0));
        Ok(filled.into_iter().map(Finalised).collect())
    }
}
