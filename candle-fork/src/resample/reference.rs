//! Nearest upsampling by index, for tests.

/// x `[lead, extents..]` to `[lead, extents * factors ..]`: each element of the result is the one whose cell it falls in.
pub fn upsample_nearest<T: Copy, const D: usize>(x: &[T], extents: [usize; D], factors: [usize; D]) -> Vec<T> {
    let size: usize = extents.iter().product();
    let out_size: usize = size * factors.iter().product::<usize>();
    let mut y = Vec::new();
    for item in x.chunks_exact(size.max(1)) {
        for index in 0..out_size {
            let (mut rest, mut source, mut stride) = (index, 0, 1);
            for axis in (0..D).rev() {
                let coordinate = rest % (extents[axis] * factors[axis]);
                rest /= extents[axis] * factors[axis];
                source += coordinate / factors[axis] * stride;
                stride *= extents[axis];
            }
            y.push(item[source]);
        }
    }
    y
}
