use std::sync::Arc;

use candle_core::{
    DType, Device, Tensor,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use half::f16;

use super::*;
use crate::{Expected, Loader, StoredDType, quant::Quantisation};

/// A file put together by hand, so that anything can be claimed.
#[derive(Default)]
struct Builder {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
    alignment: Option<u32>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Builder {
    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([text(key), kind.to_le_bytes().to_vec(), value.to_vec()].concat());
        self
    }

    /// Extents innermost first, as they are stored.
    fn tensor(mut self, name: &str, extents: &[u64], kind: u32, offset: u64, data: &[u8]) -> Self {
        let extents_bytes: Vec<u8> = extents.iter().flat_map(|d| d.to_le_bytes()).collect();
        let count = (extents.len() as u32).to_le_bytes();
        self.tensors
            .push([&text(name)[..], &count, &extents_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat());
        self.data.extend_from_slice(data);
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.version(3)
    }

    fn version(self, version: u32) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.concat());
        out.extend(self.tensors.concat());
        out.resize(out.len().next_multiple_of(self.alignment.unwrap_or(32) as usize), 0);
        out.extend(self.data);
        out
    }
}

fn open(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::from_bytes(Arc::new(bytes), "x.gguf")
}

fn refused(bytes: Vec<u8>) -> String {
    let text = open(bytes).unwrap_err().to_string();
    assert!(text.starts_with("x.gguf: ") && !text.contains('\n'), "{text}");
    text
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// What candle writes is read, block types and plain ones, and has the values that candle decodes.
#[test]
fn files_written_by_candle_are_read() {
    let device = Device::Cpu;
    let values: Vec<f32> = (0..4 * 256).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    let wide = Tensor::from_vec(values, (4, 256), &device).unwrap();
    let types = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];
    let tensors: Vec<_> =
        types.iter().map(|&t| (format!("{t:?}.weight"), QTensor::quantize(&wide, t).unwrap())).collect();
    let named: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
    let architecture = gguf_file::Value::String("flux".to_owned());
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &[(ARCHITECTURE, &architecture)], &named).unwrap();

    let source = Arc::new(open(file.into_inner()).unwrap());
    assert_eq!(source.architecture(), Some("flux"));
    assert_eq!(source.tensors().len(), types.len());
    let plan: Vec<_> = tensors.iter().map(|(name, _)| Expected::new(name.clone(), [4, 256])).collect();
    let mut loader = Loader::new(source.clone(), &plan, |_| false, DType::F32, &device).unwrap();
    let mut again = Loader::new(source.clone(), &plan, |_| false, DType::F32, &device).unwrap();
    let x =
        Tensor::from_vec((0..3 * 256).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>(), (3, 256), &device).unwrap();
    for (name, tensor) in &tensors {
        let expected = tensor.dequantize(&device).unwrap();
        let found = loader.tensor(name).unwrap();
        assert_eq!(found.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap(), "{name}");
        let product = candle_fork::linear(&x, &again.linear(name).unwrap(), None).unwrap();
        let exact = x.matmul(&expected.t().unwrap()).unwrap();
        let error = (product - &exact).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let size = exact.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(error <= 1e-5 * size, "{name}: {error} of {size}");
    }
    loader.finish().unwrap();
}

#[test]
fn metadata_become_text() {
    let list = |kind: u32, count: u64, bytes: &[u8]| [&kind.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat();
    let words = [text("a"), text("bc")].concat();
    let source = open(
        Builder { alignment: Some(64), ..Builder::default() }
            .key("general.alignment", 4, &64u32.to_le_bytes())
            .key("a.name", 8, &text("é"))
            .key("a.negative", 5, &(-3i32).to_le_bytes())
            .key("a.float", 6, &1.5f32.to_le_bytes())
            .key("a.flag", 7, &[1])
            .key("a.words", 9, &list(8, 2, &words))
            .key("a.numbers", 9, &list(4, 2, &[1, 0, 0, 0, 2, 0, 0, 0]))
            .key("a.floats", 9, &list(6, 1, &1.5f32.to_le_bytes()))
            .tensor("b", &[2], 0, 64, &f32s(&[3.0, 4.0]))
            .tensor("a", &[1], 0, 0, &[])
            .bytes_with(|data| {
                let mut all = f32s(&[9.0]);
                all.resize(64, 0);
                all.extend_from_slice(data);
                all
            }),
    )
    .unwrap();
    let metadata = source.metadata();
    let get = |key: &str| metadata[key].as_str();
    assert_eq!((get("a.name"), get("a.negative"), get("a.float"), get("a.flag")), ("é", "-3", "1.5", "true"));
    assert_eq!((get("a.words"), get("a.numbers"), get("a.floats")), ("list of 2 texts", "[1, 2]", "list of 1 numbers"));
    assert_eq!(source.bytes("a").unwrap(), f32s(&[9.0]));
    assert_eq!(source.bytes("b").unwrap(), f32s(&[3.0, 4.0]));
}

impl Builder {
    fn bytes_with(mut self, change: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
        self.data = change(&self.data);
        self.bytes()
    }
}

/// A tensor with more extents than the format has keeps its shape in the metadata.
#[test]
fn original_shapes_are_restored() {
    let shape = |extents: &[i32]| {
        let bytes: Vec<u8> = extents.iter().flat_map(|d| d.to_le_bytes()).collect();
        [&5u32.to_le_bytes()[..], &(extents.len() as u64).to_le_bytes(), &bytes].concat()
    };
    let file = |extents: &[i32]| {
        Builder::default()
            .key("comfy.gguf.orig_shape.conv.weight", 9, &shape(extents))
            .tensor("conv.weight", &[2, 6], 0, 0, &f32s(&[0.0; 12]))
            .bytes()
    };
    assert_eq!(open(file(&[1, 2, 3, 2, 1])).unwrap().tensors()[0].shape, [1, 2, 3, 2, 1]);
    assert!(refused(file(&[5, 2])).contains("another number of elements"));
    assert!(refused(file(&[1 << 30, 1 << 30, 1 << 30])).contains("another number of elements"));
    // A negative extent is no list of extents: the stored shape stays.
    assert_eq!(open(file(&[-12])).unwrap().tensors()[0].shape, [6, 2]);
}

/// Every type number: read, refused by name in a plan, or refused with its number.
#[test]
fn types_are_named() {
    for id in 0..48 {
        let (block, size) = match types::stored(id) {
            Ok(StoredDType::Ggml(t)) => (t.block(), t.block_bytes()),
            Ok(plain) => (1, plain.bits() / 8),
            Err(_) => {
                let text = refused(Builder::default().tensor("w", &[1], id, 0, &[0; 64]).bytes());
                assert!(text.contains(&format!("tensor `w` has type number {id}, a type that")), "{text}");
                continue;
            }
        };
        let file = Builder::default().tensor("blk.0.weird.weight", &[block as u64, 1], id, 0, &vec![0; size]).bytes();
        let source = Arc::new(open(file).unwrap());
        let stored = source.tensors()[0].dtype;
        let plan = [Expected::new("blk.0.weird.weight", [1, block])];
        let loaded = Loader::new(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu);
        let StoredDType::Ggml(t) = stored else { continue };
        assert_eq!(source.tensors()[0].quantisation, Some(Quantisation::Ggml(t)));
        match (t.is_supported(), loaded) {
            (true, Ok(mut loader)) => {
                let zeros = loader.tensor("blk.0.weird.weight").unwrap();
                assert_eq!(zeros.dims(), [1, block]);
            }
            (false, Err(error)) => {
                let text = error.to_string();
                assert!(text.contains(&format!("blk.0.weird.weight is {t} (type {id})")), "{text}");
                assert!(text.contains("supported GGUF types: Q4_0, "), "{text}");
                assert!(source.quant("blk.0.weird.weight").is_err());
            }
            (_, loaded) => panic!("{t}: {loaded:?}"),
        }
    }
}

/// One file of several is read, and a plan that needs more says what it is.
#[test]
fn a_part_of_a_split_model_is_told() {
    let part = |count: u16| {
        let file = Builder::default()
            .key("split.no", 2, &1u16.to_le_bytes())
            .key("split.count", 2, &count.to_le_bytes())
            .tensor("a", &[4], 0, 0, &f32s(&[1.0; 4]))
            .bytes();
        let plan = [Expected::new("a", [4]), Expected::new("b", [4])];
        let source = Arc::new(open(file).unwrap());
        Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).map(|_| ()).unwrap_err().to_string()
    };
    let text = part(3);
    assert!(text.contains("1 tensor missing (b); this is part 2 of 3 of a split model: join them"), "{text}");
    assert!(!part(1).contains("split"), "{}", part(1));
}

#[test]
fn scales_that_are_not_finite_are_refused() {
    let mut blocks = vec![0x11u8; 3 * 34];
    blocks[34..36].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let file = Builder::default().tensor("w", &[96, 1], 8, 0, &blocks).bytes();
    let plan = [Expected::new("w", [1, 96])];
    let mut loader = Loader::new(Arc::new(open(file).unwrap()), &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    let text = loader.linear("w").unwrap_err().to_string();
    assert_eq!(text, "tensor `w` of x.gguf: element 32 is in a block whose scale is inf");
}

/// Tables of tokens stay in their blocks; rows are decoded when they are asked for.
#[test]
fn rows_of_an_embedding_are_decoded() {
    let device = Device::Cpu;
    let wide = Tensor::arange(0f32, 5.0 * 64.0, &device).unwrap().reshape((5, 64)).unwrap();
    let table = QTensor::quantize(&wide, GgmlDType::Q8_0).unwrap();
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &[], &[("token_embd.weight", &table)]).unwrap();
    let plan = [Expected::new("token_embd.weight", [5, 64])];
    let source = Arc::new(open(file.into_inner()).unwrap());
    let mut loader = Loader::new(source, &plan, |_| false, DType::F32, &device).unwrap();
    let embedding = loader.embedding("token_embd.weight").unwrap();
    assert_eq!(embedding.dims(), [5, 64]);
    let rows = embedding.gather(&[4, 0, 4], DType::F32, &device).unwrap().to_vec2::<f32>().unwrap();
    let all = table.dequantize(&device).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(rows, [all[4].clone(), all[0].clone(), all[4].clone()]);
    assert!(embedding.gather(&[5], DType::F32, &device).unwrap_err().to_string().contains("row 5"));
    assert_eq!(embedding.gather(&[], DType::BF16, &device).unwrap().dims(), [0, 64]);
}

/// Everything that is wrong with a file is said in one line, and nothing is allocated for what it only claims.
#[test]
fn damaged_files_are_refused() {
    let b = Builder::default;
    let four = f32s(&[1.0; 4]);
    let list = |kind: u32, count: u64| [kind.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()].concat();
    let nested = [list(9, 1), list(4, 0)].concat();
    let mut overlong = b().tensor("w", &[4], 0, 0, &four).bytes();
    overlong.extend([0; 33]);
    let mut counts = MAGIC.to_vec();
    counts.extend(3u32.to_le_bytes());
    let with_counts =
        |tensors: u64, keys: u64| [&counts[..], &tensors.to_le_bytes(), &keys.to_le_bytes(), &[0; 64]].concat();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "an empty file, not a GGUF file"),
        (b"PK\x03\x04".to_vec(), "zip archive"),
        (MAGIC.to_vec(), "ends at byte 4, inside the header"),
        (b().version(3u32.swap_bytes()), "big-endian"),
        (b().version(1), "version 1"),
        (b().version(4), "version 4"),
        (with_counts(1 << 32, 0), "the number of tensors claims 4294967296"),
        (with_counts(0, 1 << 32), "the number of metadata entries claims 4294967296"),
        (with_counts(u64::MAX, u64::MAX), "claims 18446744073709551615"),
        (b().key("k", 8, &(1u64 << 32).to_le_bytes()).bytes(), "the length of metadata `k` claims 4294967296"),
        (b().key("k", 99, &[0; 8]).bytes(), "metadata `k` has the unknown type number 99"),
        (b().key("k", 9, &list(8, 1 << 40)).bytes(), "the list of metadata `k` claims 1099511627776"),
        (b().key("k", 9, &list(10, u64::MAX)).bytes(), "the list of metadata `k` claims 18446744073709551615"),
        (b().key("k", 9, &list(99, 0)).bytes(), "unknown type number 99"),
        (b().key("k", 9, &nested).bytes(), "a list of lists"),
        (b().key("k", 8, &text("a")).key("k", 8, &text("b")).bytes(), "duplicate metadata key `k`"),
        (b().key("general.alignment", 4, &0u32.to_le_bytes()).bytes(), "the value 0, a power of two"),
        (b().key("general.alignment", 4, &24u32.to_le_bytes()).bytes(), "the value 24"),
        (b().key("general.alignment", 4, &(1u32 << 31).to_le_bytes()).bytes(), "the value 2147483648"),
        (b().key("general.alignment", 8, &text("32")).bytes(), "an unsigned 32-bit number is needed"),
        (b().tensor("t", &[4], 0, 0, &four).tensor("t", &[4], 0, 32, &[]).bytes(), "duplicate tensor `t`"),
        (b().tensor("w", &[0], 0, 0, &[]).bytes(), "tensor `w` of type F32 and shape [0] has an extent of zero"),
        (b().tensor("w", &[4, 0], 0, 0, &[]).bytes(), "has an extent of zero"),
        (b().tensor("w", &[1 << 40, 1 << 40], 0, 0, &four).bytes(), "is larger than 64 bits can count"),
        (b().tensor("w", &[1 << 62], 0, 0, &four).bytes(), "is larger than 64 bits can count"),
        (b().tensor("w", &[u64::MAX, 2], 8, 0, &four).bytes(), "is larger than 64 bits can count"),
        (b().tensor("w", &[1; 5], 0, 0, &four).bytes(), "the number of extents of tensor `w` claims 5"),
        (b().tensor("w", &[33, 1], 8, 0, &[0; 68]).bytes(), "has rows that are no whole number of blocks"),
        (b().tensor("c", &[3, 3, 8, 8], 8, 0, &[0; 612]).bytes(), "shape [8, 8, 3, 3] has rows that are no whole"),
        (b().tensor("w", &[], 8, 0, &[0; 34]).bytes(), "no whole number of blocks"),
        (b().tensor("w", &[4], 0, 1, &four).bytes(), "offset 1 of the data, but the tensor before it ends at 0"),
        (b().tensor("w", &[4], 0, 32, &four).bytes(), "offset 32"),
        (
            b().tensor("a", &[4], 0, 0, &four).tensor("b", &[4], 0, 0, &four).bytes(),
            "tensor `b` is said to lie at offset 0",
        ),
        (b().tensor("w", &[4], 0, u64::MAX, &four).bytes(), "offset 18446744073709551615"),
        (b().tensor("w", &[5], 0, 0, &four).bytes(), "truncated download?"),
        (b().tensor("w", &[1 << 40], 0, 0, &four).bytes(), "truncated download?"),
        (overlong, "33 trailing bytes"),
        (b().tensor("a\nb", &[0], 0, 0, &[]).bytes(), "`a\\u{a}b`"),
    ];
    for (bytes, word) in cases {
        let found = refused(bytes);
        assert!(found.contains(word), "{word}: {found}");
    }
    let mut not_text = b().tensor("ww", &[4], 0, 0, &four).bytes();
    let at = not_text.windows(2).position(|w| w == b"ww").unwrap();
    not_text[at] = 0xff;
    assert!(refused(not_text).contains("is not UTF-8"));
}

/// Every file that is cut short or has a bit turned is read or refused in one line.
#[test]
fn every_cut_and_every_flipped_bit_is_survived() {
    let file = Builder::default()
        .key("general.architecture", 8, &text("flux"))
        .key("n", 4, &7u32.to_le_bytes())
        .tensor("a.weight", &[32, 2], 8, 0, &[[0x11; 68].to_vec(), vec![0; 28]].concat())
        .tensor("b", &[3], 1, 96, &[0; 6])
        .bytes();
    open(file.clone()).unwrap();
    for cut in 0..file.len() {
        let text = refused(file[..cut].to_vec());
        assert!(!text.is_empty(), "cut after {cut}");
    }
    for at in 0..file.len() {
        for bit in 0..8 {
            let mut bytes = file.clone();
            bytes[at] ^= 1 << bit;
            match open(bytes) {
                Ok(source) => source.tensors().iter().for_each(|t| assert!(source.bytes(&t.name).is_ok())),
                Err(error) => assert!(!error.to_string().contains('\n'), "byte {at} bit {bit}: {error}"),
            }
        }
    }
}
