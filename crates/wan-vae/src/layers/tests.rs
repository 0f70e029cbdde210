use candle_core::{DType, Device, Tensor};
use candle_fork::{ConvParams, conv_nd, upsample_nearest};
use weights::{Expected, Loader, write::TensorData};

use super::*;
use crate::{
    architecture::Unpack,
    testing::{bits, elements, file, noise, relative_l2},
};

/// A loader of random tensors.
fn loader(tensors: &[(&str, &[usize])]) -> Loader {
    let plan: Vec<Expected> = tensors.iter().map(|&(name, shape)| Expected::new(name, shape)).collect();
    let data: Vec<TensorData<'_>> = tensors
        .iter()
        .enumerate()
        .map(|(seed, &(name, shape))| TensorData::f32(name, shape, &elements(&noise(seed as u64 + 1, 0.3, shape))))
        .collect();
    Loader::new(file(&data), &plan, |_| false, DType::F32, &Device::Cpu).unwrap()
}

/// x `[C, T, H, W]` at an index; zero outside.
struct Grid {
    values: Vec<f32>,
    dims: [usize; 4],
}

impl Grid {
    fn new(x: &Tensor) -> Self {
        let dims: [usize; 4] = x.dims()[x.rank() - 4..].try_into().unwrap();
        Self { values: elements(x), dims }
    }

    fn at(&self, c: usize, t: isize, y: isize, x: isize) -> f64 {
        let [_, frames, height, width] = self.dims;
        let inside = |i: isize, n: usize| usize::try_from(i).ok().filter(|&i| i < n);
        match (inside(t, frames), inside(y, height), inside(x, width)) {
            (Some(t), Some(y), Some(x)) => f64::from(self.values[((c * frames + t) * height + y) * width + x]),
            _ => 0.0,
        }
    }
}

/// Builds `[C, T, H, W]` from a formula.
fn from_formula(dims: [usize; 4], f: impl Fn(usize, isize, isize, isize) -> f64) -> Tensor {
    let [c, t, h, w] = dims;
    let values: Vec<f32> = (0..c * t * h * w)
        .map(|i| f(i / (t * h * w), (i / (h * w) % t) as isize, (i / w % h) as isize, (i % w) as isize) as f32)
        .collect();
    Tensor::from_vec(values, &[1, c, t, h, w], &Device::Cpu).unwrap()
}

const CONV: [(&str, &[usize]); 2] = [("c.weight", &[5, 3, 3, 3, 3]), ("c.bias", &[5])];

#[test]
fn the_first_frame_equals_three_taps_over_zeros() {
    let mut loader = loader(&CONV);
    let mut builder = Builder::new(&mut loader);
    let conv = CausalConv3d::load(&mut builder, "c").unwrap();
    for (h, w) in [(1, 1), (1, 7), (6, 5), (17, 33)] {
        let x = noise(9, 1.0, &[1, 3, 1, h, w]);
        let generic = conv.generic_start(&x).unwrap();
        let first = conv.forward(x, &mut Slots::new(builder.slots())).unwrap();
        assert!(relative_l2(&first, &generic) < 1e-6);
    }
}

#[test]
fn a_causal_convolution_is_the_formula_however_it_is_cut() {
    let mut loader = loader(&CONV);
    let mut builder = Builder::new(&mut loader);
    let conv = CausalConv3d::load(&mut builder, "c").unwrap();
    let x = noise(9, 1.0, &[1, 3, 7, 4, 5]);
    let weight = elements(&noise(1, 0.3, CONV[0].1));
    let bias = elements(&noise(2, 0.3, CONV[1].1));
    let grid = Grid::new(&x);
    let want = from_formula([5, 7, 4, 5], |k, t, y, x| {
        let mut sum = f64::from(bias[k]);
        for i in 0..3 * 27 {
            let (c, dt, dy, dx) = (i / 27, (i / 9 % 3) as isize, (i / 3 % 3) as isize, (i % 3) as isize);
            sum += f64::from(weight[k * 81 + i]) * grid.at(c, t + dt - 2, y + dy - 1, x + dx - 1);
        }
        sum
    });
    let mut all = Vec::new();
    for plan in [&[1, 6][..], &[1, 1, 1, 1, 1, 1, 1], &[1, 2, 3, 1], &[1, 1, 5]] {
        let mut slots = Slots::new(builder.slots());
        let mut first = 0;
        let mut parts = Vec::new();
        for &frames in plan {
            slots.set_start(first == 0);
            parts.push(conv.forward(x.narrow(2, first, frames).unwrap(), &mut slots).unwrap());
            first += frames;
        }
        let y = Tensor::cat(&parts, 2).unwrap();
        assert!(relative_l2(&y, &want) < 1e-6);
        all.push(bits(&y));
    }
    assert!(all.iter().all(|one| *one == all[0]));
}

#[test]
fn a_cut_does_not_keep_the_whole_input_alive() {
    let mut loader = loader(&CONV);
    let mut builder = Builder::new(&mut loader);
    let conv = CausalConv3d::load(&mut builder, "c").unwrap();
    let mut slots = Slots::new(builder.slots());
    slots.set_start(false);
    let x = noise(9, 1.0, &[1, 3, 7, 4, 5]);
    conv.forward(x, &mut slots).unwrap();
    assert_eq!(slots.bytes(), 3 * 2 * 4 * 5 * 4);
    let past = slots.take(&super::slots::Slot::of(0)).unwrap();
    assert_eq!(past.storage_and_layout().1.start_offset(), 0);
    assert!(past.is_contiguous());
}

#[test]
fn four_small_convolutions_equal_nearest_doubling_and_a_large_one() {
    let mut loader = loader(&[("u.resample.1.weight", &[4, 6, 3, 3]), ("u.resample.1.bias", &[4])]);
    let upsample = Upsample::load(&mut Builder::new(&mut loader), "u", false).unwrap();
    let weight = noise(1, 0.3, &[4, 6, 1, 3, 3]);
    let bias = noise(2, 0.3, &[4]);
    for (t, h, w) in [(1, 1, 1), (2, 1, 3), (1, 4, 1), (3, 5, 7), (1, 2, 40)] {
        let x = noise(3, 1.0, &[1, 6, t, h, w]);
        let large = upsample_nearest(&x, [1, 2, 2]).unwrap();
        let params = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        let want = conv_nd(&large, &weight, Some(&bias), &params).unwrap();
        let got = upsample.spatial(&x).unwrap();
        assert!(relative_l2(&got, &want) < 1e-6, "{t} {h} {w}");
        // Borders by themselves, where a wrong padding would hide among the rest.
        for (axis, at) in [(3, 0), (3, 2 * h - 1), (4, 0), (4, 2 * w - 1)] {
            let edge = |t: &Tensor| t.narrow(axis, at, 1).unwrap();
            assert!(relative_l2(&edge(&got), &edge(&want)) < 1e-6, "{t} {h} {w}: axis {axis} at {at}");
        }
    }
}

/// `[K, C, 3]` taps over frames.
fn time_tensors(k: usize, c: usize) -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("u.resample.1.weight", vec![2, c, 3, 3]),
        ("u.resample.1.bias", vec![2]),
        ("u.time_conv.weight", vec![k, c, 3, 1, 1]),
        ("u.time_conv.bias", vec![k]),
    ]
}

fn tensors<'a>(list: &'a [(&'static str, Vec<usize>)]) -> Vec<(&'static str, &'a [usize])> {
    list.iter().map(|(name, shape)| (*name, shape.as_slice())).collect()
}

#[test]
fn doubling_in_time_leaves_the_first_frame_out() {
    let list = time_tensors(6, 3);
    let mut loader = loader(&tensors(&list));
    let mut builder = Builder::new(&mut loader);
    let upsample = Upsample::load(&mut builder, "u", true).unwrap();
    let x = noise(9, 1.0, &[1, 3, 5, 2, 3]);
    let (weight, bias) = (elements(&noise(3, 0.3, &list[2].1)), elements(&noise(4, 0.3, &list[3].1)));
    let grid = Grid::new(&x);
    // Frame 0 as it is; then pairs from the frames behind it, over zeros.
    let doubled = from_formula([3, 9, 2, 3], |c, t, y, x| {
        if t == 0 {
            return grid.at(c, 0, y, x);
        }
        let (frame, k) = ((t - 1) / 2 + 1, (t - 1) as usize % 2 * 3 + c);
        let tap = |i: usize, j: isize| if frame + j < 3 { 0.0 } else { grid.at(i, frame + j - 2, y, x) };
        (0..9).map(|i| f64::from(weight[k * 9 + i]) * tap(i / 3, i as isize % 3)).sum::<f64>() + f64::from(bias[k])
    });
    let want = upsample.spatial(&doubled).unwrap();
    let mut all = Vec::new();
    for plan in [&[1, 4][..], &[1, 1, 1, 1, 1], &[1, 2, 2], &[1, 3, 1]] {
        let mut slots = Slots::new(builder.slots());
        let (mut first, mut parts) = (0, Vec::new());
        for &frames in plan {
            slots.set_start(first == 0);
            parts.push(upsample.forward(x.narrow(2, first, frames).unwrap(), &mut slots).unwrap());
            first += frames;
        }
        let y = Tensor::cat(&parts, 2).unwrap();
        assert!(relative_l2(&y, &want) < 1e-6, "{plan:?}");
        all.push(bits(&y));
    }
    assert!(all.iter().all(|one| *one == all[0]));
}

#[test]
fn halving_in_time_takes_the_first_frame_along() {
    let mut list = time_tensors(2, 2);
    list[0].1[1] = 3;
    let mut loader = loader(&tensors(&list));
    let mut builder = Builder::new(&mut loader);
    let downsample = Downsample::load(&mut builder, "u", true).unwrap();
    let x = noise(9, 1.0, &[1, 3, 7, 4, 6]);
    let kernel = elements(&noise(1, 0.3, &list[0].1));
    let offset = elements(&noise(2, 0.3, &list[1].1));
    let (weight, bias) = (elements(&noise(3, 0.3, &list[2].1)), elements(&noise(4, 0.3, &list[3].1)));
    let grid = Grid::new(&x);
    let small = from_formula([2, 7, 2, 3], |k, t, y, x| {
        let tap = |i: usize| grid.at(i / 9, t, 2 * y + (i / 3 % 3) as isize, 2 * x + (i % 3) as isize);
        (0..27).map(|i| f64::from(kernel[k * 27 + i]) * tap(i)).sum::<f64>() + f64::from(offset[k])
    });
    let small = Grid::new(&small);
    let want = from_formula([2, 4, 2, 3], |k, t, y, x| {
        if t == 0 {
            return small.at(k, 0, y, x);
        }
        let tap = |i: usize| small.at(i / 3, 2 * t - 2 + (i % 3) as isize, y, x);
        (0..6).map(|i| f64::from(weight[k * 6 + i]) * tap(i)).sum::<f64>() + f64::from(bias[k])
    });
    for plan in [&[1, 6][..], &[1, 2, 2, 2], &[1, 4, 2]] {
        let mut slots = Slots::new(builder.slots());
        let (mut first, mut parts) = (0, Vec::new());
        for &frames in plan {
            slots.set_start(first == 0);
            parts.push(downsample.forward(x.narrow(2, first, frames).unwrap(), &mut slots).unwrap());
            first += frames;
        }
        assert!(relative_l2(&Tensor::cat(&parts, 2).unwrap(), &want) < 1e-6, "{plan:?}");
    }
}

#[test]
fn attention_is_the_formula_in_each_frame() {
    let c = 5;
    let list: [(&str, &[usize]); 5] = [
        ("a.norm.gamma", &[5, 1, 1]),
        ("a.to_qkv.weight", &[15, 5, 1, 1]),
        ("a.to_qkv.bias", &[15]),
        ("a.proj.weight", &[5, 5, 1, 1]),
        ("a.proj.bias", &[5]),
    ];
    let mut loader = loader(&list);
    let attention = Attention::load(&mut Builder::new(&mut loader), "a").unwrap();
    let [gamma, qkv, qkv_bias, proj, proj_bias] =
        std::array::from_fn(|i| elements(&noise(i as u64 + 1, 0.3, list[i].1)).iter().map(|&v| f64::from(v)).collect());
    let gamma: Vec<f64> = gamma;
    for (t, h, w) in [(1, 1, 1), (2, 3, 5), (3, 7, 9)] {
        let x = noise(9, 2.0, &[1, c, t, h, w]);
        let grid = Grid::new(&x);
        let n = h * w;
        let mut want = vec![0.0; c * t * n];
        for frame in 0..t {
            let map = |v: &[f64], weight: &[f64], bias: &[f64], row: usize| {
                v.iter().zip(&weight[row * c..]).map(|(v, w)| v * w).sum::<f64>() + bias[row]
            };
            let input = |p: usize| -> Vec<f64> {
                (0..c).map(|i| grid.at(i, frame as isize, (p / w) as isize, (p % w) as isize)).collect()
            };
            let rows: Vec<Vec<f64>> = (0..n)
                .map(|p| {
                    let v = input(p);
                    let norm = v.iter().map(|v| v * v).sum::<f64>().sqrt();
                    let normed: Vec<f64> =
                        v.iter().zip(&gamma).map(|(v, g)| v / norm * (c as f64).sqrt() * g).collect();
                    (0..3 * c).map(|row| map(&normed, &qkv, &qkv_bias, row)).collect()
                })
                .collect();
            for p in 0..n {
                let score = |k: usize| (0..c).map(|i| rows[p][i] * rows[k][c + i]).sum::<f64>() / (c as f64).sqrt();
                let weights: Vec<f64> = (0..n).map(|k| score(k).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mixed: Vec<f64> =
                    (0..c).map(|i| (0..n).map(|k| weights[k] * rows[k][2 * c + i]).sum::<f64>() / total).collect();
                for i in 0..c {
                    want[(i * t + frame) * n + p] = input(p)[i] + map(&mixed, &proj, &proj_bias, i);
                }
            }
        }
        let want: Vec<f32> = want.iter().map(|&v| v as f32).collect();
        let want = Tensor::from_vec(want, x.dims(), &Device::Cpu).unwrap();
        assert!(relative_l2(&attention.forward(x).unwrap(), &want) < 1e-6, "{t} {h} {w}");
    }
}

#[test]
fn patches_put_the_column_first_and_pixel_shuffles_the_row() {
    let (c, t, h, w) = (3, 2, 4, 6);
    let x = noise(1, 1.0, &[c, t, h, w]);
    let grid = Grid::new(&x);
    let packed = patchify(&x, 2).unwrap();
    assert_eq!(packed.dims(), [1, 12, 2, 2, 3]);
    let want = from_formula([12, t, 2, 3], |channel, t, y, x| {
        let (c, r, q) = (channel / 4, (channel / 2 % 2) as isize, (channel % 2) as isize);
        grid.at(c, t, 2 * y + q, 2 * x + r)
    });
    assert_eq!(bits(&packed), bits(&want));
    assert_eq!(bits(&unpack(&packed, Unpack::Patches(2)).unwrap()), bits(&x));
    let shuffled = unpack(&packed, Unpack::PixelShuffle(2)).unwrap();
    let packed = Grid::new(&packed);
    let want =
        from_formula([c, t, h, w], |c, t, y, x| packed.at(c * 4 + (y % 2 * 2 + x % 2) as usize, t, y / 2, x / 2));
    assert_eq!(bits(&shuffled), bits(&want));
    assert_eq!(bits(&unpack(&patchify(&x, 1).unwrap(), Unpack::Patches(1)).unwrap()), bits(&x));
}

/// Frames 0 alone, then the rest: what [`AvgDown`] adds to nothing.
fn avg_down(down: AvgDown, output: usize, x: &Tensor) -> Tensor {
    let (_, _, t, h, w) = x.dims5().unwrap();
    let part = |first: usize, frames: usize, out: usize| {
        let zeros = Tensor::zeros((1, output, out, h / down.fs, w / down.fs), DType::F32, &Device::Cpu).unwrap();
        down.add(&zeros, &x.narrow(2, first, frames).unwrap()).unwrap()
    };
    Tensor::cat(&[part(0, 1, 1), part(1, t - 1, (t - 1) / down.ft)], 2).unwrap()
}

#[test]
fn means_of_every_encoder_stage() {
    // Input and output width, factors in time and space: the rows of the published network, 80 times narrower.
    for (a, b, ft, fs) in [(2, 2, 1, 2), (2, 4, 2, 2), (4, 8, 2, 2), (8, 8, 1, 1), (6, 3, 1, 1)] {
        let x = noise(1, 1.0, &[1, a, 5, 4, 6]);
        let grid = Grid::new(&x);
        let group = a * ft * fs * fs / b;
        let frames = 1 + 4 / ft;
        let want = from_formula([b, frames, 4 / fs, 6 / fs], |o, t, y, x| {
            let one = |i: usize| {
                let (c, dt, q, r) = (i / (ft * fs * fs), i / (fs * fs) % ft, i / fs % fs, i % fs);
                // Zeros stand before the first frame.
                let frame = t * ft as isize + dt as isize - (ft as isize - 1);
                grid.at(c, frame, y * fs as isize + q as isize, x * fs as isize + r as isize)
            };
            (o * group..(o + 1) * group).map(one).sum::<f64>() / group as f64
        });
        let got = avg_down(AvgDown { ft, fs }, b, &x);
        assert!(relative_l2(&got, &want) < 1e-6, "{a} {b} {ft} {fs}");
        if (ft, fs) == (1, 1) && a == b {
            assert_eq!(bits(&got), bits(&x));
        }
        if ft == 2 {
            // Even outputs of the first frame are means of the zeros before it.
            let first = Grid::new(&got);
            assert!((0..b).step_by(2).all(|o| first.at(o, 0, 0, 0) == 0.0) && first.at(1, 0, 0, 0) != 0.0);
        }
    }
}

#[test]
fn repetitions_of_every_decoder_stage() {
    // The last two do not occur in published networks: nothing is repeated, and repeats that are no product of factors.
    for (a, b, ft, fs) in [(4, 4, 2, 2), (4, 2, 1, 2), (8, 4, 2, 2), (8, 2, 1, 2), (4, 6, 1, 2), (2, 1, 2, 2)] {
        let x = noise(1, 1.0, &[1, a, 3, 2, 3]);
        let grid = Grid::new(&x);
        let up = DupUp { ft, fs };
        let repeats = b * ft * fs * fs / a;
        let frames = 3 * ft - (ft - 1);
        let want = from_formula([b, frames, 2 * fs, 3 * fs], |o, t, y, x| {
            let t = (t as usize) + ft - 1;
            let (y, x) = (y as usize, x as usize);
            let channel = (((o * ft + t % ft) * fs + y % fs) * fs + x % fs) / repeats;
            grid.at(channel, (t / ft) as isize, (y / fs) as isize, (x / fs) as isize)
        });
        let part = |first: usize, frames: usize, out: usize| {
            let zeros = Tensor::zeros((1, b, out, 2 * fs, 3 * fs), DType::F32, &Device::Cpu).unwrap();
            up.add(&zeros, &x.narrow(2, first, frames).unwrap()).unwrap()
        };
        let got = Tensor::cat(&[part(0, 1, 1), part(1, 2, 2 * ft)], 2).unwrap();
        assert_eq!(bits(&got), bits(&want), "{a} {b} {ft} {fs}");
    }
}

#[test]
fn a_residual_block_is_its_formula() {
    for shortcut in [false, true] {
        let b = if shortcut { 6 } else { 4 };
        let mut list: Vec<(&str, Vec<usize>)> = vec![
            ("r.norm1.gamma", vec![4, 1, 1, 1]),
            ("r.conv1.weight", vec![b, 4, 3, 3, 3]),
            ("r.conv1.bias", vec![b]),
            ("r.norm2.gamma", vec![b, 1, 1, 1]),
            ("r.conv2.weight", vec![b, b, 3, 3, 3]),
            ("r.conv2.bias", vec![b]),
        ];
        if shortcut {
            list.extend([("r.conv_shortcut.weight", vec![b, 4, 1, 1, 1]), ("r.conv_shortcut.bias", vec![b])]);
        }
        let mut loader = loader(&tensors(&list));
        let mut builder = Builder::new(&mut loader);
        let block = ResidualBlock::load(&mut builder, "r", shortcut).unwrap();
        let x = noise(9, 1.0, &[1, 4, 1, 5, 6]);
        let part = |i: usize| noise(i as u64 + 1, 0.3, &list[i].1);
        let half = |x: &Tensor, i: usize| {
            let norm = x.sqr().unwrap().sum_keepdim(1).unwrap().sqrt().unwrap();
            let root = (x.dims()[1] as f64).sqrt();
            let normed = (x.broadcast_div(&norm).unwrap() * root).unwrap();
            let y = normed.broadcast_mul(&part(i).unsqueeze(0).unwrap()).unwrap().silu().unwrap();
            let params = ConvParams { padding: [(2, 0), (1, 1), (1, 1)], ..ConvParams::default() };
            conv_nd(&y, &part(i + 1), Some(&part(i + 2)), &params).unwrap()
        };
        let branch = half(&half(&x, 0), 3);
        let raw = if shortcut {
            conv_nd::<3>(&x, &part(6), Some(&part(7)), &ConvParams::default()).unwrap()
        } else {
            x.clone()
        };
        let got = block.forward(x, &mut Slots::new(builder.slots())).unwrap();
        assert!(relative_l2(&got, &(raw + branch).unwrap()) < 1e-6);
    }
}
