//! A checked call, and the tables of its mask on the device.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    draw::{self, DrawLaunch, Indices},
    tables::{Cut, Run},
    tile::{COLUMNS, NumbersLaunch, SizesLaunch},
};
use crate::{
    cube::launch::{elem, table},
    problem::Problem,
};

/// Tables kept: all layers have the same, and a ring of ranks two or three for each other rank.
const KEPT: usize = 64;

/// The tables of a mask, with those of dropout behind them.
pub struct OnDevice {
    /// As in [`Tables`](super::tables::Tables).
    pub rows: Vec<Vec<Run>>,
    pub words: CubeTensor,
    pub patterns_at: usize,
    pub positions_at: usize,
}

#[derive(PartialEq)]
struct Key {
    cut: Cut,
    indices: Option<Indices>,
    device: CubeDevice,
}

impl Key {
    fn tables(&self, like: &CubeTensor) -> OnDevice {
        let tables = self.cut.tables();
        let patterns_at = tables.patterns_at();
        let mut words = tables.words();
        let positions_at = words.len();
        words.extend(self.indices.iter().flat_map(Indices::words));
        OnDevice {
            rows: tables.rows,
            words: table(like, words),
            patterns_at,
            positions_at,
        }
    }
}

/// The last used first.
static RECENT: Mutex<VecDeque<(Key, Arc<OnDevice>)>> = Mutex::new(VecDeque::new());

fn recent(key: Key, like: &CubeTensor) -> Arc<OnDevice> {
    // Nothing panics while the list is half changed.
    let lock = || RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut recent = lock();
    let known = recent.iter().position(|(known, _)| *known == key);
    if let Some(entry) = known.and_then(|at| recent.remove(at)) {
        let tables = entry.1.clone();
        recent.push_front(entry);
        return tables;
    }
    drop(recent);
    let tables = Arc::new(key.tables(like));
    let mut recent = lock();
    recent.push_front((key, tables.clone()));
    recent.truncate(KEPT);
    tables
}

/// One call, checked.
pub struct Call<'a> {
    pub problem: Problem<'a>,
}

impl Call<'_> {
    /// The tables of the mask, cut into tiles of queries by keys, or of keys by queries if `transposed`.
    pub fn tables(&self, like: &CubeTensor, transposed: bool, height: usize, width: usize) -> Arc<OnDevice> {
        let spec = self.problem.spec;
        let (queries, keys) = (spec.q_positions.clone(), spec.k_positions.clone());
        let (rows, columns) = if transposed { (keys, queries) } else { (queries, keys) };
        let cut = Cut {
            mask: spec.mask.clone(),
            rows,
            columns,
            transposed,
            height,
            width,
        };
        let key = Key {
            cut,
            indices: Indices::of(spec),
            device: like.device.clone(),
        };
        recent(key, like)
    }

    pub fn sizes(&self, tables: &OnDevice) -> SizesLaunch {
        let p = &self.problem;
        let map = p.spec.heads;
        SizesLaunch::new(
            p.batch,
            p.queries,
            p.keys,
            p.heads,
            p.kv_heads,
            p.head_dim,
            p.value_dim,
            map.ratio,
            map.offset,
            tables.patterns_at,
        )
    }

    pub fn numbers(&self) -> NumbersLaunch {
        let spec = self.problem.spec;
        let kept = draw::rule(spec).map_or(1.0, |rule| rule.scale);
        let number = |x: f64| InputScalar::new(x, elem(self.problem.accumulator));
        NumbersLaunch::new(number(spec.scale), number(f64::NEG_INFINITY), number(kept))
    }

    pub fn draw(&self, tables: &OnDevice) -> DrawLaunch {
        DrawLaunch::of(self.problem.spec, tables.positions_at)
    }

    /// Whether any weight is dropped.
    pub fn drops(&self) -> bool {
        draw::rule(self.problem.spec).is_some()
    }
}

/// Chunks of columns in a row of this width, as [`add_product`](super::tile::add_product) has them.
pub fn chunks(width: usize) -> usize {
    width.div_ceil(COLUMNS)
}
