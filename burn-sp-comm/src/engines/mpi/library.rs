//! The calls of the MPI library, behind as little `unsafe` as possible. Everything here runs on the engine's thread.

use super::area::Area;
use crate::CommError;
use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// A count is a C `int`, so longer runs of bytes are sent as blocks of this many.
const BLOCK: usize = 1 << 30;

/// An initialised MPI, and the communicator of all processes.
pub struct Library {
    universe: Option<Universe>,
    /// For what all processes do together.
    common: ffi::MPI_Comm,
    /// For messages of the present launch.
    comm: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
    /// The largest tag.
    pub tags: usize,
}

/// A message under way.
pub struct Request(ffi::MPI_Request);

/// Messages under way, each with what is to be done when it is over.
pub struct Requests<T> {
    raw: Vec<ffi::MPI_Request>,
    what: Vec<Option<T>>,
    done: Vec<c_int>,
}

/// What an MPI call returned, if it failed.
#[derive(Debug)]
pub struct Fault(String);

impl Fault {
    /// Not the library's fault.
    pub fn other(what: impl Into<String>) -> Fault {
        Fault(what.into())
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Library {
    /// Initialises MPI for this process.
    ///
    /// # Errors
    /// If somebody else has done so, or the library cannot be called from threads.
    pub fn start() -> Result<Library, CommError> {
        // The engine has one thread for all its calls, but the program may make some of its own.
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Multiple) else {
            return Err(CommError::invalid(
                "mpi: the library was initialised by someone else in this process; let `launch` do it",
            ));
        };
        if threading < Threading::Serialized {
            return Err(CommError::invalid(
                "mpi: the library does not allow calls from threads other than the first; use one built with thread support",
            ));
        }
        // SAFETY: MPI is initialised. All outputs are valid for writing.
        unsafe {
            let (mut rank, mut size, mut comm) = (0, 0, ffi::RSMPI_COMM_NULL);
            let started = check("MPI_Comm_dup", ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm))
                .and_then(|()| {
                    // An error of the library is reported like any other, instead of ending the process.
                    check(
                        "MPI_Comm_set_errhandler",
                        ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN),
                    )
                })
                .and_then(|()| check("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank)))
                .and_then(|()| check("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut size)));
            started.map_err(|fault| CommError::invalid(format!("mpi: {fault}")))?;
            let (mut bound, mut found): (*mut c_int, c_int) = (null_mut(), 0);
            let asked = ffi::MPI_Comm_get_attr(
                ffi::RSMPI_COMM_WORLD,
                ffi::MPI_TAG_UB as c_int,
                (&raw mut bound).cast::<c_void>(),
                &mut found,
            );
            // What the standard guarantees, where the library does not say.
            let tags = if asked == 0 && found != 0 && !bound.is_null() {
                *bound
            } else {
                32_767
            };
            Ok(Library {
                universe: Some(universe),
                common: comm,
                comm,
                rank: rank as usize,
                size: size as usize,
                tags: tags as usize,
            })
        }
    }

    /// Ends MPI, which waits until all processes do.
    pub fn finish(&mut self) {
        self.universe = None;
    }

    /// From now on no message meets one from before. All processes call it.
    pub fn renew(&mut self) -> Result<(), Fault> {
        // SAFETY: the communicator is valid, the new one is written.
        let code = unsafe { ffi::MPI_Comm_dup(self.common, &mut self.comm) };
        check("MPI_Comm_dup", code)
    }

    /// Sends `bytes` of rank 0 to every rank; all ranks call it, with equally many.
    pub fn share(&self, bytes: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: the bytes are valid for as long as the call takes.
        let code = unsafe {
            ffi::MPI_Bcast(
                bytes.as_mut_ptr().cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                0,
                self.common,
            )
        };
        check("MPI_Bcast", code)
    }

    /// Starts to send what lies in the areas, one after the other, as one message.
    ///
    /// # Safety
    /// The areas must stay readable and unchanged until the request is over.
    pub unsafe fn send(&self, areas: &[Area], to: usize, tag: usize) -> Result<Request, Fault> {
        let mut request = ffi_null();
        let message = Message::new(areas)?;
        // SAFETY: the caller vouches for the memory; the type is committed.
        let code = unsafe {
            ffi::MPI_Isend(
                message.start.cast_const(),
                message.count,
                message.kind,
                to as c_int,
                tag as c_int,
                self.comm,
                &mut request,
            )
        };
        check("MPI_Isend", code).map(|()| Request(request))
    }

    /// Starts to receive a message into the areas; `from` is none for any sender.
    ///
    /// # Safety
    /// The areas must stay writable and unused by others until the request is over.
    pub unsafe fn receive(&self, areas: &[Area], from: Option<usize>, tag: usize) -> Result<Request, Fault> {
        let mut request = ffi_null();
        let message = Message::new(areas)?;
        // SAFETY: the caller vouches for the memory; the type is committed.
        let code = unsafe {
            ffi::MPI_Irecv(
                message.start,
                message.count,
                message.kind,
                from.map_or(ffi::RSMPI_ANY_SOURCE, |from| from as c_int),
                tag as c_int,
                self.comm,
                &mut request,
            )
        };
        check("MPI_Irecv", code).map(|()| Request(request))
    }
}

fn ffi_null() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

impl<T> Requests<T> {
    pub fn new() -> Self {
        Requests {
            raw: Vec::new(),
            what: Vec::new(),
            done: Vec::new(),
        }
    }

    pub fn push(&mut self, request: Request, what: T) {
        self.raw.push(request.0);
        self.what.push(Some(what));
    }

    /// What is over since the last call. Moves all messages on.
    pub fn completed(&mut self) -> Result<Vec<T>, Fault> {
        if self.raw.is_empty() {
            return Ok(Vec::new());
        }
        let mut count: c_int = 0;
        self.done.resize(self.raw.len(), 0);
        // SAFETY: the arrays have as many elements as there are requests.
        let code = unsafe {
            ffi::MPI_Testsome(
                self.raw.len() as c_int,
                self.raw.as_mut_ptr(),
                &mut count,
                self.done.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            )
        };
        check("MPI_Testsome", code)?;
        if count <= 0 {
            return Ok(Vec::new()); // Also where no request is active.
        }
        let mut done: Vec<usize> = self.done[..count as usize]
            .iter()
            .map(|index| *index as usize)
            .collect();
        done.sort_unstable();
        let over = done.iter().filter_map(|index| self.what[*index].take()).collect();
        // From the back, so that what moves into the gap is not one that is to go.
        for index in done.into_iter().rev() {
            self.raw.swap_remove(index);
            self.what.swap_remove(index);
        }
        Ok(over)
    }

    /// Gives up on the receives for which `which` says so. They are over soon after, with nothing in them.
    pub fn cancel(&mut self, which: impl Fn(&T) -> bool) {
        for (index, what) in self.what.iter().enumerate() {
            if what.as_ref().is_some_and(&which) {
                // SAFETY: the request is active. Whether the cancelling fails does not matter: nobody waits for it.
                unsafe { ffi::MPI_Cancel(&mut self.raw[index]) };
            }
        }
    }
}

/// Where a message lies, as MPI is told.
struct Message {
    start: *mut c_void,
    count: c_int,
    kind: ffi::MPI_Datatype,
    /// Types to be freed; MPI keeps them for as long as messages need them.
    made: Vec<ffi::MPI_Datatype>,
}

impl Drop for Message {
    fn drop(&mut self) {
        for kind in &mut self.made {
            // SAFETY: made by this message and freed once.
            unsafe { ffi::MPI_Type_free(kind) };
        }
    }
}

impl Message {
    fn new(areas: &[Area]) -> Result<Message, Fault> {
        let mut message = Message {
            start: areas.first().map_or(null_mut(), |area| area.start.cast()),
            count: 1,
            // SAFETY: a constant of the library.
            kind: unsafe { ffi::RSMPI_UINT8_T },
            made: Vec::new(),
        };
        match areas {
            [] => message.count = 0,
            [area] if area.is_dense() && area.bytes() <= BLOCK => message.count = area.bytes() as c_int,
            [area] => {
                message.kind = message.of_area(area)?;
                message.commit()?;
            }
            areas => {
                let kinds = areas
                    .iter()
                    .map(|area| message.of_area(area))
                    .collect::<Result<Vec<_>, _>>()?;
                // Relative to the first, by addresses.
                let offsets: Vec<ffi::MPI_Aint> = areas
                    .iter()
                    .map(|area| (area.start as isize).wrapping_sub(areas[0].start as isize) as ffi::MPI_Aint)
                    .collect();
                message.kind = message.together(&kinds, &offsets)?;
                message.commit()?;
            }
        }
        Ok(message)
    }

    /// One element after the other, along the area's loops.
    fn of_area(&mut self, area: &Area) -> Result<ffi::MPI_Datatype, Fault> {
        let mut kind = self.run(area.run)?;
        for (length, step) in area.loops.iter().rev() {
            kind = self.make("MPI_Type_create_hvector", |new| {
                // SAFETY: `kind` is a type, `new` is written.
                unsafe { ffi::MPI_Type_create_hvector(*length as c_int, 1, *step as ffi::MPI_Aint, kind, new) }
            })?;
        }
        Ok(kind)
    }

    /// So many bytes in a row.
    fn run(&mut self, bytes: usize) -> Result<ffi::MPI_Datatype, Fault> {
        // SAFETY: a constant of the library.
        let byte = unsafe { ffi::RSMPI_UINT8_T };
        let of = |count: usize, kind: ffi::MPI_Datatype| {
            move |new: *mut ffi::MPI_Datatype| {
                // SAFETY: `kind` is a type, `new` is written.
                unsafe { ffi::MPI_Type_contiguous(count as c_int, kind, new) }
            }
        };
        if bytes <= BLOCK {
            return self.make("MPI_Type_contiguous", of(bytes, byte));
        }
        let (blocks, rest) = (bytes / BLOCK, bytes % BLOCK);
        let block = self.make("MPI_Type_contiguous", of(BLOCK, byte))?;
        let blocks_kind = self.make("MPI_Type_contiguous", of(blocks, block))?;
        let rest = self.make("MPI_Type_contiguous", of(rest, byte))?;
        self.together(&[blocks_kind, rest], &[0, (blocks * BLOCK) as ffi::MPI_Aint])
    }

    fn together(&mut self, kinds: &[ffi::MPI_Datatype], offsets: &[ffi::MPI_Aint]) -> Result<ffi::MPI_Datatype, Fault> {
        let lengths = vec![1; kinds.len()];
        self.make("MPI_Type_create_struct", |new| {
            // SAFETY: the three arrays are equally long, `new` is written.
            unsafe {
                ffi::MPI_Type_create_struct(
                    kinds.len() as c_int,
                    lengths.as_ptr(),
                    offsets.as_ptr(),
                    kinds.as_ptr(),
                    new,
                )
            }
        })
    }

    fn make(
        &mut self,
        name: &str,
        make: impl FnOnce(*mut ffi::MPI_Datatype) -> c_int,
    ) -> Result<ffi::MPI_Datatype, Fault> {
        // SAFETY: a constant of the library.
        let mut new = unsafe { ffi::RSMPI_DATATYPE_NULL };
        check(name, make(&mut new))?;
        self.made.push(new);
        Ok(new)
    }

    fn commit(&mut self) -> Result<(), Fault> {
        // SAFETY: `kind` was made by this message.
        check("MPI_Type_commit", unsafe { ffi::MPI_Type_commit(&mut self.kind) })
    }
}

/// The library's words for an error code.
fn check(name: &str, code: c_int) -> Result<(), Fault> {
    if code == 0 {
        return Ok(());
    }
    // Longer than any library's limit.
    let (mut text, mut length) = ([0u8; 1024], 0);
    // SAFETY: the text has room for whatever the library writes.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let words = match told {
        0 => String::from_utf8_lossy(&text[..length as usize]).into_owned(),
        _ => format!("error {code}"),
    };
    Err(Fault(format!("{name}: {words}")))
}
