//! Parts that take some tokens at a time: the values and gradients of all at once.

mod common;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, activation::gelu};
use burn_sp::layout::{Axis, MeshShape, Placement, Split};
use burn_sp::train::tiled;
use burn_sp::{SpTensor, seeded};
use burn_sp_tests::cast;
use common::{f64s, mesh, noise, ranks, tensor};

const TOKENS: usize = 7;

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let mlp = seeded(device, 3, |device| Mlp {
            up: LinearConfig::new(4, 8).init(device),
            down: LinearConfig::new(8, 3).init(device),
        });
        cast(mlp, DType::F64)
    }

    fn forward(&self, x: SpTensor<3>) -> SpTensor<3> {
        x.tokenwise(|x| self.down.forward(gelu(self.up.forward(x))))
    }
}

fn close(name: &str, a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "{name}");
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-13, "{name} is off by {worst}");
}

/// Output and gradients of the input and both weights, of all tokens at once or in tiles.
fn run(device: &burn_sp::SpDevice, tiles: Option<usize>) -> Vec<Vec<f64>> {
    let whole = tensor(&noise(5, 2 * TOKENS * 4), [2, TOKENS, 4], DType::F64, device.device());
    let weights = tensor(&noise(6, 2 * TOKENS * 3), [2, TOKENS, 3], DType::F64, device.device());
    let whole = if device.device().is_autodiff() {
        whole.require_grad()
    } else {
        whole
    };
    let mlp = Mlp::new(device.device());
    let layout = |shape: [usize; 3]| device.sequence_layout(shape);
    let x = device.distribute(whole.clone(), &layout([2, TOKENS, 4]));
    let y = match tiles {
        Some(tiles) => tiled(&mlp, x, tiles, |mlp: &Mlp, x| mlp.forward(x)),
        None => mlp.forward(x),
    };
    assert_eq!(*y.layout(), layout([2, TOKENS, 3]));
    let out = f64s(y.local());
    if !device.device().is_autodiff() {
        return vec![out];
    }
    let weights = device.distribute(weights, &layout([2, TOKENS, 3]));
    let grads = (y.into_local() * weights.into_local()).sum().backward();
    let of = |x: &Tensor<2>| f64s(&x.grad(&grads).expect("a gradient"));
    vec![
        out,
        f64s(&whole.grad(&grads).expect("a gradient")),
        of(&mlp.up.weight.val()),
        of(&mlp.down.weight.val()),
    ]
}

#[test]
fn tiles_are_all_at_once() {
    for shape in [
        MeshShape::default(),
        mesh(2, 1, 1),
        mesh(1, 2, 2),
        MeshShape::ulysses(3),
    ] {
        ranks(shape, |device| {
            let plain = run(&device, None);
            // Also more tiles than a rank has tokens.
            for tiles in [1, 2, 3, 9] {
                let found = run(&device, Some(tiles));
                for (name, (a, b)) in ["y", "dx", "up", "down"].iter().zip(plain.iter().zip(&found)) {
                    close(&format!("{shape}, {tiles} tiles, rank {}: {name}", device.rank()), a, b);
                }
            }
        });
    }
}

#[test]
fn without_a_graph_too() {
    let config = common::config(MeshShape::ulysses(2));
    burn_sp::launch(&config, &common::device(), |device: burn_sp::SpDevice| {
        for tiles in [1, 3, 9] {
            close("y", &run(&device, None)[0], &run(&device, Some(tiles))[0]);
        }
    })
    .unwrap();
}

/// What a tile's part does to the tokens must be undone in it.
#[test]
fn what_cannot_be_put_together_is_refused() {
    let refusal = |shape: MeshShape, body: fn(&burn_sp::SpDevice)| {
        let error = burn_sp::launch(
            &common::config(shape),
            &common::device(),
            |device: burn_sp::SpDevice| body(&device),
        );
        error.expect_err("a refusal").to_string()
    };
    let none = refusal(MeshShape::ulysses(1), |device| {
        let x = SpTensor::replicated(Tensor::<3>::ones([1, 4, 2], device.device()), device);
        tiled(&Vec::<Linear>::new(), x, 0, |_, x| x);
    });
    assert!(none.contains("tiled: 0 tiles; give it at least 1"), "{none}");
    let moved = refusal(MeshShape::tp(2), |device| {
        let x = SpTensor::replicated(Tensor::<3>::ones([1, 4, 2], device.device()), device);
        let x = x.shard(Axis::Tp, 1, Split::Contiguous);
        tiled(&Vec::<Linear>::new(), x, 2, |_, x| {
            x.redistribute(Axis::Tp, Placement::Replicate)
        });
    });
    assert!(
        moved.contains("give them back in the layout in which they came"),
        "{moved}"
    );
    let outside = refusal(MeshShape::tp(2).with_ulysses(2), |device| {
        let x = SpTensor::replicated(Tensor::<3>::ones([1, 4, 2], device.device()), device);
        let x = x
            .shard(Axis::Tp, 1, Split::Contiguous)
            .shard(Axis::Ulysses, 1, Split::Contiguous);
        tiled(&Vec::<Linear>::new(), x, 2, |_, x| x);
    });
    assert!(outside.contains("shard its tokens over Tp, inside"), "{outside}");
}
