//! A machine for the part of pickle that checkpoints of tensors use. It builds data; it runs nothing.
//!
//! The instructions are those of CPython's `pickletools.py`, protocols 2 to 5. Objects live in one list and refer to each
//! other by number, so what is shared or repeated costs no copies, nothing recurses however deep it nests, and memory is
//! at most proportional to the length of the pickle. Classes and functions are those of [`global`] only.

use std::collections::HashMap;

use super::problem::PthError;
use crate::{dtype::StoredDType, error::shown};

type Result<T, E = PthError> = std::result::Result<T, E>;

/// Most objects of one pickle; a tensor takes about fifteen.
const MAX_OBJECTS: usize = 1 << 20;

/// Number of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Id(u32);

/// An object.
#[derive(Debug)]
pub(super) enum Object<'a> {
    /// Something that is never needed: none, numbers with fractions, bytes, sets, devices.
    Opaque,
    Int(i64),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    /// Elements in a member of the archive; `len` counts elements, or bytes if the type is open.
    Storage {
        dtype: Option<StoredDType>,
        key: &'a str,
        len: i64,
    },
    /// A tensor; its arguments are storage, offset, shape, strides, and for version 3 further on the element type.
    Tensor {
        args: Id,
        version: u8,
    },
}

/// The classes and functions that a checkpoint of tensors names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    Size,
    RebuildTensor { version: u8 },
    RebuildParameter,
    RebuildFromType,
    TensorType,
    Storage(Option<StoredDType>),
    DType(Option<StoredDType>),
    Device,
}

/// The known class or function of that name: data only, none of them has effects.
fn global(module: &str, name: &str) -> Option<Global> {
    use StoredDType as D;
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor { version: 2 },
        ("torch._utils", "_rebuild_tensor_v3") => Global::RebuildTensor { version: 3 },
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Global::RebuildParameter,
        ("torch._tensor", "_rebuild_from_type_v2") => Global::RebuildFromType,
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer") => Global::TensorType,
        ("torch" | "torch.storage", "UntypedStorage") => Global::Storage(None),
        ("torch", _) if name.ends_with("Storage") => Global::Storage(Some(match name {
            "DoubleStorage" => D::F64,
            "FloatStorage" => D::F32,
            "HalfStorage" => D::F16,
            "BFloat16Storage" => D::BF16,
            "LongStorage" => D::I64,
            "IntStorage" => D::I32,
            "ShortStorage" => D::I16,
            "CharStorage" => D::I8,
            "ByteStorage" => D::U8,
            "BoolStorage" => D::Bool,
            "ComplexFloatStorage" => D::C64,
            _ => return None,
        })),
        ("torch", _) => Global::DType(Some(match name {
            "float64" => D::F64,
            "float32" => D::F32,
            "float16" => D::F16,
            "bfloat16" => D::BF16,
            "float8_e4m3fn" => D::F8E4M3,
            "float8_e5m2" => D::F8E5M2,
            "float8_e4m3fnuz" => D::F8E4M3Fnuz,
            "float8_e5m2fnuz" => D::F8E5M2Fnuz,
            "float8_e8m0fnu" => D::F8E8M0,
            "int64" => D::I64,
            "int32" => D::I32,
            "int16" => D::I16,
            "int8" => D::I8,
            "uint64" => D::U64,
            "uint32" => D::U32,
            "uint16" => D::U16,
            "uint8" => D::U8,
            "bool" => D::Bool,
            "complex64" => D::C64,
            "complex32" | "complex128" => return Some(Global::DType(None)),
            _ => return None,
        })),
        _ => return None,
    })
}

/// What a pickle holds.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    objects: Vec<Object<'a>>,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads a pickle.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut machine = Machine {
            bytes,
            at: 0,
            begin: 0,
            objects: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        while !machine.step()? {}
        let root = machine.pop()?;
        Ok(Self { objects: machine.objects, root })
    }

    /// The object that the pickle is about.
    pub(super) fn root(&self) -> Id {
        self.root
    }

    /// An object by its number.
    pub(super) fn get(&self, id: Id) -> &Object<'a> {
        // Numbers are made by `Machine::add` only.
        &self.objects[id.0 as usize]
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the current instruction starts, for messages.
    begin: usize,
    objects: Vec<Object<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    /// Runs one instruction; true after the last.
    fn step(&mut self) -> Result<bool> {
        self.begin = self.at;
        let opcode = self.take(1)?[0];
        match opcode {
            // PROTO
            0x80 => {
                if !(2..=5).contains(&self.take(1)?[0]) {
                    return self.fail("the protocol is not one of 2 to 5");
                }
            }
            // FRAME: only a hint for reading ahead.
            0x95 => self.take(8).map(|_| ())?,
            b'.' => return Ok(true),
            // NONE, NEWTRUE, NEWFALSE, EMPTY_SET
            b'N' | 0x88 | 0x89 | 0x8f => self.push(Object::Opaque)?,
            // BININT, BININT1, BININT2, LONG1
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Object::Int(value.into()))?;
            }
            b'K' => {
                let value = self.take(1)?[0];
                self.push(Object::Int(value.into()))?;
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Object::Int(value.into()))?;
            }
            0x8a => {
                let len = self.take(1)?[0].into();
                let value = long(self.take(len)?);
                self.push(value)?;
            }
            // BINFLOAT
            b'G' => self.take(8).and_then(|_| self.push(Object::Opaque))?,
            // BINUNICODE, SHORT_BINUNICODE, BINUNICODE8; BINSTRING, SHORT_BINSTRING
            b'X' | b'T' | 0x8c | b'U' | 0x8d => {
                let bytes = self.counted(opcode)?;
                let Ok(text) = std::str::from_utf8(bytes) else { return self.fail("a text is not UTF-8") };
                self.push(Object::Text(text))?;
            }
            // LONG4, BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8
            0x8b | b'B' | b'C' | 0x8e | 0x96 => self.counted(opcode).and_then(|_| self.push(Object::Opaque))?,
            b')' => self.push(Object::Tuple(Vec::new()))?,
            b']' => self.push(Object::List(Vec::new()))?,
            b'}' => self.push(Object::Dict(Vec::new()))?,
            // TUPLE1, TUPLE2, TUPLE3
            0x85..=0x87 => {
                let len = usize::from(opcode - 0x84);
                let mut items = Vec::with_capacity(len);
                for _ in 0..len {
                    items.push(self.pop()?);
                }
                items.reverse();
                self.push(Object::Tuple(items))?;
            }
            b'(' => self.marks.push(self.stack.len()),
            b't' => {
                let items = self.pop_mark()?;
                self.push(Object::Tuple(items))?;
            }
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Object::List(items))?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = self.pairs(&items)?;
                self.push(Object::Dict(pairs))?;
            }
            // FROZENSET
            0x91 => self.pop_mark().and_then(|_| self.push(Object::Opaque))?,
            // APPEND; APPENDS, ADDITEMS
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            // SETITEM, SETITEMS
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            // POP, POP_MARK, DUP
            b'0' => self.pop().map(|_| ())?,
            b'1' => self.pop_mark().map(|_| ())?,
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // BINPUT, LONG_BINPUT, MEMOIZE
            b'q' | b'r' | 0x94 => {
                let slot = match opcode {
                    b'q' => u32::from(self.take(1)?[0]),
                    b'r' => u32::from_le_bytes(self.array()?),
                    // As many as objects at most, which are fewer than 2^32.
                    _ => self.memo.len() as u32,
                };
                let top = self.top()?;
                self.memo.insert(slot, top);
            }
            // BINGET, LONG_BINGET
            b'h' | b'j' => {
                let slot = if opcode == b'h' { self.take(1)?[0].into() } else { u32::from_le_bytes(self.array()?) };
                let Some(&id) = self.memo.get(&slot) else { return self.fail("an object is used before it is made") };
                self.stack.push(id);
            }
            // GLOBAL, STACK_GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.object(module), self.object(name)) {
                    (&Object::Text(module), &Object::Text(name)) => self.push_global(module, name)?,
                    _ => return self.fail("the name of a class is not a text"),
                }
            }
            // REDUCE, NEWOBJ
            b'R' | 0x81 => {
                let (args, callable) = (self.pop()?, self.pop()?);
                self.call(callable, args)?;
            }
            // BUILD: the state of dictionaries and tensors (`_metadata`, hooks) is not needed.
            b'b' => self.pop().and_then(|_| self.top()).map(|_| ())?,
            // BINPERSID
            b'Q' => {
                let id = self.pop()?;
                let storage = self.storage(id)?;
                self.push(storage)?;
            }
            _ => return Err(PthError::Opcode { at: self.begin, opcode }),
        }
        Ok(false)
    }

    /// What an allowed function makes of its arguments.
    fn call(&mut self, callable: Id, args: Id) -> Result<()> {
        let (&Object::Global(function), Object::Tuple(items)) = (self.object(callable), self.object(args)) else {
            return self.fail("something that is not a function is called");
        };
        let first = items.first().copied();
        match (function, first) {
            (Global::OrderedDict, None) => self.push(Object::Dict(Vec::new())),
            (Global::RebuildTensor { version }, _) => self.push(Object::Tensor { args, version }),
            // Both wrap what stands first.
            (Global::Size | Global::RebuildParameter, Some(inner)) => {
                self.stack.push(inner);
                Ok(())
            }
            // A function, a type, the function's arguments, a state.
            (Global::RebuildFromType, Some(function)) => match (self.object(function), items.get(2)) {
                (&Object::Global(Global::RebuildTensor { version }), Some(&args)) => {
                    self.push(Object::Tensor { args, version })
                }
                _ => self.fail("a tensor is made by an unknown function"),
            },
            (Global::Device, _) => self.push(Object::Opaque),
            _ => self.fail("a function is called with arguments that it does not take"),
        }
    }

    /// A storage from its persistent name: the word `storage`, its type, its key, its device, its length.
    fn storage(&self, id: Id) -> Result<Object<'a>> {
        if let Object::Tuple(items) = self.object(id)
            && let &[word, class, key, _, len] = items.as_slice()
            && let (&Object::Text("storage"), &Object::Global(Global::Storage(dtype))) =
                (self.object(word), self.object(class))
            && let (&Object::Text(key), &Object::Int(len)) = (self.object(key), self.object(len))
        {
            return Ok(Object::Storage { dtype, key, len });
        }
        self.fail("a reference to something other than a storage")
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        match global(module, name) {
            Some(known) => self.push(Object::Global(known)),
            None => Err(PthError::ForeignClass { class: shown(&format!("{module}.{name}")) }),
        }
    }

    fn append(&mut self, items: &[Id]) -> Result<()> {
        let top = self.top()?;
        match self.object_mut(top) {
            Object::List(list) => list.extend_from_slice(items),
            // A set.
            Object::Opaque => {}
            _ => return self.fail("an item is added to something other than a list"),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<()> {
        let pairs = self.pairs(items)?;
        let top = self.top()?;
        let Object::Dict(dict) = self.object_mut(top) else {
            return self.fail("a key is set in something other than a dictionary");
        };
        dict.extend(pairs);
        Ok(())
    }

    fn pairs(&self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        if !items.len().is_multiple_of(2) {
            return self.fail("a key without a value");
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn object(&self, id: Id) -> &Object<'a> {
        &self.objects[id.0 as usize]
    }

    fn object_mut(&mut self, id: Id) -> &mut Object<'a> {
        &mut self.objects[id.0 as usize]
    }

    /// Makes an object and puts it on the stack.
    fn push(&mut self, object: Object<'a>) -> Result<()> {
        if self.objects.len() >= MAX_OBJECTS {
            return self.fail("more objects than a list of tensors needs");
        }
        // The limit lies below 2^32.
        self.stack.push(Id(self.objects.len() as u32));
        self.objects.push(object);
        Ok(())
    }

    fn top(&self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(&id) if self.stack.len() > floor => Ok(id),
            _ => self.fail("the stack is empty"),
        }
    }

    fn pop(&mut self) -> Result<Id> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.split_off(height)),
            None => self.fail("a list ends that never began"),
        }
    }

    /// Bytes with their length before them, as wide as the instruction says.
    fn counted(&mut self, opcode: u8) -> Result<&'a [u8]> {
        let len = match opcode {
            0x8c | b'U' | b'C' => u64::from(self.take(1)?[0]),
            0x8d | 0x8e | 0x96 => u64::from_le_bytes(self.array()?),
            _ => u32::from_le_bytes(self.array()?).into(),
        };
        match usize::try_from(len) {
            Ok(len) => self.take(len),
            Err(_) => self.fail("the pickle ends inside an instruction"),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end)) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => self.fail("the pickle ends inside an instruction"),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.take(N)?.first_chunk() {
            Some(bytes) => Ok(*bytes),
            None => self.fail("the pickle ends inside an instruction"),
        }
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|&b| b == b'\n') else {
            return self.fail("the pickle ends inside an instruction");
        };
        self.at += len + 1;
        match std::str::from_utf8(&rest[..len]) {
            Ok(text) => Ok(text.trim_end_matches('\r')),
            Err(_) => self.fail("a text is not UTF-8"),
        }
    }

    fn fail<T>(&self, problem: &'static str) -> Result<T> {
        Err(PthError::Pickle { at: self.begin, problem })
    }
}

/// A little-endian number in two's complement; one of more than 64 bits is nothing that a tensor needs.
fn long(bytes: &[u8]) -> Object<'static> {
    if bytes.len() > 8 {
        return Object::Opaque;
    }
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut raw = if negative { [0xff; 8] } else { [0; 8] };
    raw[..bytes.len()].copy_from_slice(bytes);
    Object::Int(i64::from_le_bytes(raw))
}
