//! Dropout with a regenerated mask.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::support::*;
use crate::{
    DropoutSpec,
    checks::{self, accumulation},
    cube::{
        launch::{elem, empty, into_contiguous, table},
        philox::{Stream, block, word},
    },
    dropout::{DropRule, Runs},
    philox::halves,
};

/// See [`Kernels::dropout`](crate::Kernels::dropout).
pub fn apply(x: CubeTensor, spec: &DropoutSpec) -> CubeTensor {
    checks::dropout(&x, spec);
    let dtypes = dtypes("dropout", &x);
    let x = into_contiguous(x);
    let elements = x.meta.num_elements();
    let Some(mask) = HostMask::new(spec, elements) else {
        return x;
    };
    let y = empty(&x, x.shape(), x.dtype);
    let width = width(&x, elements);
    let (cubes, dim) = elementwise(elements / width);
    let (runs, mask, in_blocks) = mask.arguments(&x, width);
    // SAFETY: a unit beyond the last vector does nothing, and the table has an entry for every run.
    unsafe {
        dropout_kernel::launch_unchecked(
            &y.client,
            cubes,
            dim,
            address(&[&x]),
            width,
            x.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            runs,
            mask,
            (elements / width) as u32,
            in_blocks,
            dtypes,
        );
    }
    y
}

/// Which elements are dropped, and where each run of consecutive global indices starts among the local elements.
pub struct HostMask {
    rule: DropRule,
    seed: u64,
    stream: u64,
    runs: Vec<(usize, u64)>,
}

/// The tables and numbers of a mask as arguments of a kernel, and whether its vectors of four are blocks of the
/// generator.
pub type Arguments = (ComptimeOptionArgs<&'static [u32]>, MaskLaunch, bool);

impl HostMask {
    /// None if nothing is dropped.
    ///
    /// # Panics
    /// If there are more elements than 32 bits can count.
    pub fn new(spec: &DropoutSpec, elements: usize) -> Option<Self> {
        assert!(
            u32::try_from(elements).is_ok(),
            "dropout: {elements} elements on one device, expected less than 2^32"
        );
        let rule = DropRule::new(spec.probability).filter(|_| elements > 0)?;
        Some(Self {
            rule,
            seed: spec.seed,
            stream: spec.stream,
            runs: Runs::new(&spec.shape, &spec.positions).flat(),
        })
    }

    /// What a kernel gets that loads `width` elements of a tensor like `like` at once.
    pub fn arguments(&self, like: &CubeTensor, width: usize) -> Arguments {
        let in_blocks =
            width == 4 && (self.runs.iter()).all(|(local, global)| local.is_multiple_of(4) && global.is_multiple_of(4));
        // A single run is the rule: it comes as numbers, without a table.
        let runs = (self.runs.len() > 1).then(|| {
            let values = (self.runs.iter())
                .flat_map(|&(local, global)| {
                    let [low, high] = halves(global);
                    [local as u32, low, high]
                })
                .collect();
            table(like, values).into_buffer_arg()
        });
        let [first_low, first_high] = halves(self.runs[0].1);
        let mask = MaskLaunch::new(
            Stream::argument(self.seed, self.stream),
            self.rule.threshold(),
            InputScalar::new(self.rule.scale, elem(accumulation(like.dtype))),
            self.runs.len() as u32,
            first_low,
            first_high,
        );
        (runs.into(), mask, in_blocks)
    }
}

/// The numbers of a mask.
#[derive(CubeType, CubeLaunch)]
pub struct Mask {
    stream: Stream,
    /// The smallest word that stays.
    threshold: u32,
    /// Factor of what stays.
    scale: InputScalar,
    runs: u32,
    /// Global index of the first element, in halves.
    first_low: u32,
    first_high: u32,
}

impl Mask {
    /// The mask of a kernel that drops nothing.
    pub fn none() -> MaskLaunch {
        let scale = InputScalar::new(1.0, ElemType::Float(FloatKind::F32));
        MaskLaunch::new(Stream::argument(0, 0), 0, scale, 1, 0, 0)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn dropout_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    runs: ComptimeOption<&[u32]>,
    mask: &Mask,
    vectors: u32,
    #[comptime] in_blocks: bool,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= vectors as usize {
        terminate!();
    }
    let value = Vector::<A, N>::cast_from(x[ABSOLUTE_POS]);
    y[ABSOLUTE_POS] = Vector::cast_from(drop_vector::<A, N>(value, ABSOLUTE_POS as u32, runs, mask, in_blocks));
}

/// The vector with this index among the local vectors, after dropout.
#[cube]
pub fn drop_vector<A: Float, N: Size>(
    value: Vector<A, N>,
    index: u32,
    runs: ComptimeOption<&[u32]>,
    mask: &Mask,
    #[comptime] in_blocks: bool,
) -> Vector<A, N> {
    let local = index * N::value() as u32;
    let kept = value * Vector::new(mask.scale.get::<A>());
    let zero = A::from_int(0);
    let mut out = Vector::<A, N>::zeroed();
    if in_blocks {
        let (low, high) = global_index(local, runs, mask);
        let (w0, w1, w2, w3) = block(low, high, &mask.stream);
        out.insert(0usize, select(w0 >= mask.threshold, kept.extract(0usize), zero));
        out.insert(1usize, select(w1 >= mask.threshold, kept.extract(1usize), zero));
        out.insert(2usize, select(w2 >= mask.threshold, kept.extract(2usize), zero));
        out.insert(3usize, select(w3 >= mask.threshold, kept.extract(3usize), zero));
    } else {
        #[unroll]
        for lane in 0..N::value() {
            let (low, high) = global_index(local + lane as u32, runs, mask);
            let word = word(low, high, &mask.stream);
            out.insert(lane, select(word >= mask.threshold, kept.extract(lane), zero));
        }
    }
    out
}

/// The global index of a local element, in halves.
#[cube]
fn global_index(local: u32, runs: ComptimeOption<&[u32]>, mask: &Mask) -> (u32, u32) {
    let mut within = local;
    let mut first_low = mask.first_low;
    let mut first_high = mask.first_high;
    #[comptime]
    match runs {
        ComptimeOption::Some(runs) => {
            // The last run that does not start behind the element.
            let mut at = 0u32;
            let mut end = mask.runs;
            while end - at > 1 {
                let middle = (at + end) / 2;
                if runs[(3 * middle) as usize] <= local {
                    at = middle;
                } else {
                    end = middle;
                }
            }
            let at = (3 * at) as usize;
            within = local - runs[at];
            first_low = runs[at + 1];
            first_high = runs[at + 2];
        }
        ComptimeOption::None => {}
    }
    let low = first_low + within;
    let carry = select(low < within, 1u32, 0u32);
    (low, first_high + carry)
}
